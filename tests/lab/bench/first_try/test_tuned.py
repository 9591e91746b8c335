"""The best setting of each optimizer, from records that are written by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootfree_lab.bench.first_try import tuned
from rootfree_lab.bench.first_try.command import TUNED
from rootfree_lab.bench.first_try.records import Record, read
from rootfree_lab.bench.markdown import filled

DOCS = Path(__file__).parents[4] / "docs"


def record(optimizer: str, lr: float, seed: int, found: float, *, task="gpt_sotu", **more):
    curve = [(600, more.pop("halfway", 2.0)), (1200, found)]
    return Record(
        task=task, optimizer=optimizer, label=f"{optimizer} lr={lr:g}", options={"lr": lr},
        seed=seed, scale="full", steps=1200, constant=False, device="cuda", curve=curve,
        final_loss=found, test_loss=found, test_error=found / 10, **more,
    )  # fmt: skip


RECORDS = [
    record("AdamW", 1e-3, 0, 1.2),
    record("AdamW", 2e-3, 0, 1.1),
    record("AdamW", 2e-3, 1, 1.3),
    record("Muon", 1e-3, 0, 1.09),
    record("Muon", 1e-3, 1, 1.11),
    record("IFWhitening", 1e-3, 0, 1.0, halfway=1.1),
    record("IFWhitening", 1e-3, 1, 1.18, halfway=1.4),
    record("IFWhitening", 2e-3, 0, 0.9, diverged=True),
    record("IFWhitening", 3e-3, 1, 0.1),  # never tried with the seed that decides
]


def test_seed_0_decides_and_all_seeds_are_shown():
    (found,) = tuned.tuned(RECORDS).values()
    assert list(found) == ["AdamW", "Muon", "IFWhitening"]
    assert (found["AdamW"].options, found["AdamW"].tried) == ("lr=0.002", 2)
    assert found["AdamW"].scores == [1.1, 1.3]
    assert (found["IFWhitening"].options, found["IFWhitening"].tried) == ("lr=0.001", 2)
    assert tuned.shares(found["IFWhitening"], found["AdamW"]) == [0.5, 1.0]
    assert tuned.shares(found["Muon"], found["AdamW"]) == [1.0, 1.0]


def test_a_later_record_of_a_run_counts():
    again = record("Muon", 1e-3, 1, 1.5)
    found = tuned.tuned([*RECORDS, again])["gpt_sotu"]["Muon"]
    assert found.scores == [1.09, 1.5]


@pytest.mark.parametrize(("margin", "met"), [(0.0049, False), (0.0051, True)])
def test_the_bar_of_the_byte_transformer(margin, met):
    runs = [record("Muon", 1e-3, 0, 1.1), record("IFWhitening", 1e-3, 0, 1.1 - margin)]
    bars = tuned.bars(tuned.tuned(runs))
    assert bars[0].met is met
    assert bars[1].met is None  # SOAP was not run
    assert "0.005 below tuned Muon" in bars[0].demand


@pytest.mark.parametrize(("margin", "met"), [(0.0149, False), (0.0151, True)])
def test_the_bar_of_the_resnet_is_for_the_best_without_a_root(margin, met):
    errors = {"AdamW": 0.2, "SGD": 0.3, "RFRMSprop": 0.25, "IFShampoo": 0.2 - margin}
    task = "resnet_cifar10"
    runs = [record(name, 1e-3, 0, 10 * error, task=task) for name, error in errors.items()]
    *_, beside_adamw, beside_sgd = tuned.bars(tuned.tuned(runs))
    assert (beside_adamw.met, beside_sgd.met) == (met, True)
    assert "IFShampoo" in beside_adamw.label


def test_the_page_shows_the_committed_runs():
    text = tuned.as_markdown(tuned.tuned(read(DOCS / "first_try" / "tuned.jsonl")))
    page = DOCS / "choosing.md"
    assert filled(page, text, TUNED) == page.read_text(encoding="utf-8")
