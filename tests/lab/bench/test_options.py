"""The options of `rootfree bench`: one declaration each, whichever modes share them."""

from __future__ import annotations

from dataclasses import fields
from typing import get_type_hints

from typer.main import get_command

from rootfree_lab.bench.options import MODES
from rootfree_lab.cli.app import app


def test_modes_that_share_an_option_mean_the_same():
    declared: dict[str, set[str]] = {}
    for mode in MODES.values():
        hints = get_type_hints(mode, include_extras=True)
        for each in fields(mode):
            declared.setdefault(each.name, set()).add(repr((hints[each.name], each.default)))
    assert {"json", "page", "device"} <= declared.keys()
    assert [name for name, found in declared.items() if len(found) > 1] == []


def test_the_command_has_the_options_of_all_modes():
    command = get_command(app).commands["bench"]
    names = {parameter.name for parameter in command.params} - {"help"}
    assert names == {each.name for mode in MODES.values() for each in fields(mode)}
    assert all(parameter.help for parameter in command.params if parameter.name != "help")
