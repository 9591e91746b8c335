"""What a search leaves: the best settings and narrowed spaces as a config, and all records."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

from rootfree_lab.config import own_code
from rootfree_lab.config.reading import Table, read_toml
from rootfree_lab.files.records import append_missing
from rootfree_lab.files.toml_writing import write_toml
from rootfree_lab.search.attempts import Status, best
from rootfree_lab.search.ledger import Ledger
from rootfree_lab.search.spaces import FIXED, Settings, as_table, default_space, with_settings
from rootfree_lab.training.run import records_path, sweep

BEST = "best.toml"
_HEAD = (
    "The best settings of a search, written by `rootfree search`; for `rootfree compare`.",
    "The measure that each had at the end of its trial:",
)


def write_records(ledger: Ledger, out: Path) -> None:
    """Add the records of all trials to the folder's file, other machines' trials among them."""
    found = [
        status.result.record
        for label in ledger.entries
        for status in ledger.statuses(label)
        if status.result is not None and status.result.record is not None
    ]
    append_missing(records_path(out), found)


def sweep_checkpoints(ledger: Ledger, out: Path) -> None:
    """Remove the checkpoints of trials that have a result: their process was killed at the end."""
    for label, entry in ledger.entries.items():
        for status in ledger.statuses(label):
            if status.result is not None:
                sweep(out, entry.trial(status.slot, status.result.settings))


def write_best(ledger: Ledger, tables: Table, out: Path) -> Path | None:
    """Write the config with the best settings so far; None where no trial has completed.

    What the file has of entries that are not searched now stays.
    """
    found = {label: best(ledger.statuses(label)) for label in ledger.entries}
    settings = {
        label: each.result.settings
        for label, each in found.items()
        if each is not None and each.result is not None
    }
    if not settings:
        return None
    path = out / BEST
    config = with_best(tables, settings, _narrowed(ledger))
    for table in (config, *config["compare"]):
        own_code.make_relative(table, out)
    remarks = _remarks(found)
    order = [entry["label"] for entry in tables.get("compare", [])]
    if path.is_file() and order:
        remarks = _with_former(path, order, config, remarks)
    write_toml(path, config, remarks=[*_HEAD, *remarks.values()])
    return path


def _with_former(
    path: Path, order: list[str], config: Table, remarks: dict[str, str]
) -> dict[str, str]:
    """Add to `config` what the file has of the entries without a remark; the remarks of all."""
    former = read_toml(path)
    spaces = former.get("search", {}).get("spaces", {}) | config["search"]["spaces"]
    said = [line.removeprefix("# ") for line in path.read_text(encoding="utf-8").splitlines()]
    for entry in former.get("compare", []):
        label = entry["label"]
        if label in order and label not in remarks:
            config["compare"].append(entry)
            line = next((line for line in said if line.startswith(f"  {label}: ")), None)
            remarks[label] = line or f"  {label}: from an earlier search"
    config["compare"].sort(key=lambda entry: order.index(entry["label"]))
    config["search"]["spaces"] = {label: spaces[label] for label in order if label in spaces}
    return {label: remarks[label] for label in order if label in remarks}


def with_best(
    tables: Table, settings: Mapping[str, Settings], spaces: Mapping[str, Table]
) -> Table:
    """The tables of a config with the best settings of each entry; entries without are left out."""
    result = copy.deepcopy(tables)
    entries = result.get("compare")
    if entries:
        result["compare"] = [entry for entry in entries if entry["label"] in settings]
        for entry in result["compare"]:
            entry["optimizer"] = with_settings(entry.get("optimizer", {}), settings[entry["label"]])
    else:
        ((label, values),) = settings.items()
        result["optimizer"] = with_settings(result["optimizer"], values)
        result["compare"] = [{"label": label, "optimizer": dict(result["optimizer"])}]
    result["search"] = {**result.get("search", {}), "spaces": dict(spaces)}
    return result


def _narrowed(ledger: Ledger) -> dict[str, Table]:
    spaces = {}
    for label, entry in ledger.entries.items():
        space = ledger.space(label, 2, ledger.statuses(label))
        left_out = [
            name for name in default_space(entry.config.optimizer.name) if name not in entry.space
        ]
        spaces[label] = as_table(space or entry.space) | dict.fromkeys(left_out, FIXED)
    return spaces


def _remarks(found: Mapping[str, Status | None]) -> dict[str, str]:
    """What the head of the file says of each entry."""
    lines = {}
    for label, status in found.items():
        if status is None:
            lines[label] = f"  {label}: no trial has completed, so it is not in this file"
        else:
            stage = "wide" if status.slot.stage == 1 else "narrowed"
            lines[label] = f"  {label}: {status.value:.5g} ({stage} trial {status.slot.number})"
    return {label: line.replace("\n", " ") for label, line in lines.items()}
