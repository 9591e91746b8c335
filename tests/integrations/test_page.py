"""The scripts of docs/integrations.md run; those for several ranks in test_ranks.py."""

from __future__ import annotations

import pytest
import torch

from integrations.needs import needs
from integrations.page import LOOPS, scripts

NEEDED = {
    "Hugging Face Trainer": ("transformers", "accelerate"),
    "peft": ("peft", "transformers"),
    "accelerate": ("accelerate",),
    "Lightning": ("lightning",),
    "timm": ("timm",),
}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_every_script_of_the_page_is_run():
    assert set(scripts()) == {*NEEDED, *LOOPS}


@pytest.mark.parametrize(
    "heading", [pytest.param(each, marks=needs(*NEEDED[each])) for each in NEEDED]
)
def test_the_script_trains(heading, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = {"__name__": "__main__"}
    exec(compile(scripts()[heading], heading, "exec"), namespace)
    state = getattr(namespace["optimizer"], "optimizer", namespace["optimizer"]).state
    assert {int(row["step"]) for row in state.values()} in ({1}, {4})
    assert all(p.isfinite().all() for p in namespace["model"].parameters())
