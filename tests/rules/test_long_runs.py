"""`tools/long_runs.py`: short runs of it here, and what the page says of the long ones."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import tool_scripts
from rootfree.rules import if_shampoo, rf_shampoo

long_runs = tool_scripts.load("long_runs")
KRONECKER = ["IFShampoo", "RFShampoo", "IFWhitening"]


@pytest.mark.slow
@pytest.mark.parametrize("method", long_runs.METHODS)
def test_state_stays_finite_and_factors_at_one_scale(method):
    outcome = long_runs.run(method, steps=500, look=100)
    assert long_runs.healthy(outcome), outcome
    one_factor = "Full" in method
    assert all((ratio is None) == one_factor for ratio in outcome.ratios.values())


@pytest.mark.parametrize("method", KRONECKER)
def test_factors_that_nothing_balances_are_found(method, monkeypatch):
    def nothing(means):
        return [torch.zeros_like(mean) for mean in means]

    for module in (if_shampoo, rf_shampoo):
        monkeypatch.setattr(module, "exponents", nothing)
    narrow = dataclasses.replace(long_runs.METHODS[method], shapes=((16, 64),))
    monkeypatch.setitem(long_runs.METHODS, method, narrow)
    outcome = long_runs.run(method, steps=1000)
    assert outcome.broken is None
    assert not long_runs.healthy(outcome)


def test_state_that_is_not_finite_is_found(monkeypatch):
    method = dataclasses.replace(long_runs.METHODS["IFShampoo"], shapes=((2, 6),))
    monkeypatch.setitem(long_runs.METHODS, "IFShampoo", method)

    def infinite(means):
        return [torch.full_like(mean, 200.0 * (-1) ** n) for n, mean in enumerate(means)]

    monkeypatch.setattr(if_shampoo, "exponents", infinite)
    outcome = long_runs.run("IFShampoo", steps=20, look=10)
    assert outcome.broken == "step 10: parameter of 2x6, ordinary"
    assert not long_runs.healthy(outcome)


def test_gradients_are_of_their_kinds():
    drawn = {
        kind: long_runs.gradients(kind, (5, 3, 4), 5000, torch.Generator().manual_seed(0))
        for kind in long_runs.KINDS
    }
    sizes = {kind: G.flatten(1).norm(dim=1) for kind, G in drawn.items()}
    assert sizes["ordinary"].max() < 3 * sizes["ordinary"].min()
    for n in range(3):
        unfolded = drawn["rank one"].movedim(n + 1, 1).flatten(2)
        assert (torch.linalg.matrix_rank(unfolded) == 1).all()
    assert torch.linalg.matrix_rank(drawn["ordinary"].flatten(2)).min() > 1
    zeros = sizes["sometimes zero"] == 0
    assert 0.5 < zeros.float().mean() < 0.8
    assert (drawn["sometimes zero"][..., -1] == 0).all()
    assert sizes["jumping"].max() > 1e6 * sizes["jumping"].min()


def test_a_run_on_file_is_not_repeated(tmp_path, monkeypatch, capsys):
    file, page = tmp_path / "runs.jsonl", tmp_path / "page.md"
    page.write_text(f"{long_runs.MARKS.begin}\nold\n{long_runs.MARKS.end}\n")
    words = ["--steps", "3", "--methods", "IFShampoo", "--json", str(file), "--page", str(page)]
    assert long_runs.main(words) == 0
    monkeypatch.delattr(long_runs, "run")
    assert long_runs.main(words) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("| IFShampoo | 3 | yes |")
    assert "| IFShampoo | 3 | yes |" in page.read_text()
    broken = {**json.loads(file.read_text()), "broken": "step 1"}
    file.write_text(json.dumps(broken))
    assert long_runs.main(words) == 1


def test_the_page_has_the_runs_on_file():
    outcomes = long_runs.read(tool_scripts.ROOT / "docs" / "reliability" / "long_runs.jsonl")
    page = (tool_scripts.ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    begin, end = (page.index(mark) for mark in (long_runs.MARKS.begin, long_runs.MARKS.end))
    listed = [outcomes[method] for method in long_runs.METHODS if method in outcomes]
    assert long_runs.table(listed) in page[begin:end]
    assert all(map(long_runs.healthy, listed))
    assert set(KRONECKER) <= set(outcomes)
