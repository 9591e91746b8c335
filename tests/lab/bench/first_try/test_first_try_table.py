"""Table and verdict from records that are made by hand: a changed number changes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rootfree_lab.bench.first_try import verdict
from rootfree_lab.bench.first_try.records import Record
from rootfree_lab.bench.first_try.suite import TASKS
from rootfree_lab.bench.first_try.table import as_markdown, cells, labels_of, short, text
from rootfree_lab.bench.first_try.verdict import Bar, bars

TEN = list(TASKS)[:10]


def record(label: str, task: str, loss: float | None, *, seed: int = 0, late: float = 1.0):
    return Record(
        task=task, optimizer=label.split()[0], label=label, options={}, seed=seed, scale="small",
        steps=100, constant=False, device="cpu", batch_size=64, first_loss=2.0, final_loss=loss,
        best_mean=loss, late_ratio=late, diverged=loss is None,
    )  # fmt: skip


def all_tasks(label: str, loss: float, **other: float | None) -> list[Record]:
    return [record(label, task, other.get(task, loss)) for task in TEN]


def bar(label: str, *records: list[Record], letter: str | None = None) -> Bar:
    found = bars(cells(r for group in records for r in group), {})
    return next(b for b in found if b.label == label and letter in (None, b.letter))


ADAMW = all_tasks("AdamW", 1.0)


def test_cells_have_ratio_loss_and_range():
    runs = [
        record("AdamW", "mlp_digits", 0.5),
        *(record("SGD", "mlp_digits", loss, seed=s) for s, loss in enumerate((0.2, 0.3, 0.4))),
    ]
    assert text(cells(runs), "SGD", "mlp_digits") == "0.3 ± 0.1"
    assert short(cells(runs), "SGD", "mlp_digits") == "0.60"
    runs[-1] = record("SGD", "mlp_digits", 0.7, seed=2)
    assert text(cells(runs), "SGD", "mlp_digits") == "0.4 ± 0.2"
    assert short(cells(runs), "SGD", "mlp_digits") == "0.80"
    runs[-1] = record("SGD", "mlp_digits", None, seed=2)
    assert short(cells(runs), "SGD", "mlp_digits") == "diverged 1/3"
    assert short(cells(runs), "Muon", "mlp_digits") == "-"


def test_the_later_record_of_a_seed_counts():
    runs = [record("AdamW", "mlp_digits", 0.5), record("AdamW", "mlp_digits", 0.25)]
    assert text(cells(runs), "AdamW", "mlp_digits") == "0.25 ± 0"


def test_rows_are_in_the_order_of_the_line_up():
    labels = ["IFShampoo lr=0.003", "IFShampoo", "SGD", "AdamW"]
    found = cells(record(label, "mlp_digits", 1.0) for label in labels)
    assert labels_of(found) == ["AdamW", "SGD", "IFShampoo", "IFShampoo lr=0.003"]
    lines = as_markdown(found).splitlines()
    assert lines[0] == "| task | AdamW: loss | IFShampoo | IFShampoo lr=0.003 | SGD |"
    assert lines[2] == "| mlp_digits | 1 ± 0 | 1.00 | 1.00 | 1.00 |"


def test_optimizers_of_some_tasks_have_a_table_of_their_own():
    runs = [*all_tasks("AdamW", 1.0), *all_tasks("SGD", 2.0)]
    runs.append(record("RFFullAdagrad", TEN[3], 0.5))
    first, second = as_markdown(cells(runs)).split("\n\n")
    assert first.splitlines()[0] == "| task | AdamW: loss | SGD |"
    assert len(first.splitlines()) == 2 + len(TEN)
    assert second.splitlines()[0] == "| task | AdamW: loss | RFFullAdagrad |"
    assert second.splitlines()[2:] == [f"| {TEN[3]} | 1 ± 0 | 0.50 |"]


def test_whitening_is_at_most_adamw_and_well_below_on_half():
    def met(*values: float) -> bool | None:
        losses = dict(zip(TEN, values, strict=True))
        return bar("IFWhitening", ADAMW, all_tasks("IFWhitening", 1.0, **losses)).met

    assert met(*[0.5] * 5, *[1.0] * 5)
    assert not met(*[0.5] * 4, *[1.0] * 6)  # well below on four of ten
    assert not met(*[0.5] * 4, 0.9, *[1.0] * 5)
    assert not met(*[0.5] * 9, 1.01)


@pytest.mark.parametrize("label", ["IFShampoo", "RFShampoo"])
def test_root_free_matrix_methods_stay_near_adamw(label):
    assert bar(label, ADAMW, all_tasks(label, 1.05), letter="b").met
    missed = bar(label, ADAMW, all_tasks(label, 1.0, vit_cifar10=1.06), letter="b")
    assert not missed.met
    assert missed.found == "above: vit_cifar10 1.06"
    diverged = all_tasks(label, 0.1)
    diverged[0] = record(label, TEN[0], None)
    assert not bar(label, ADAMW, diverged, letter="b").met


@pytest.mark.parametrize("label", ["RFRMSprop", "RFAdamW"])
def test_diagonal_methods_may_lose_two_of_ten(label):
    two = {TEN[0]: 1.3, TEN[1]: 9.0}
    assert bar(label, ADAMW, all_tasks(label, 1.2, **two), letter="c").met
    assert not bar(label, ADAMW, all_tasks(label, 1.2, **two, **{TEN[2]: 1.21}), letter="c").met


def test_full_matrix_methods_are_compared_with_sgd_on_convex_tasks():
    convex = ["logistic_breast_cancer", "least_squares_diabetes"]
    sgd = [record("SGD", task, 0.5) for task in [*TASKS]]
    for label in ("RFFullAdagrad", "IFFullAdagrad gamma=1"):
        ours = [record(label, task, 0.5) for task in convex]
        found = bar(label, sgd, ours, letter="d")
        assert (found.met, found.tasks) == (True, 2)
        ours[1] = record(label, convex[1], 0.51)
        assert not bar(label, sgd, ours, letter="d").met


def test_late_spikes_count_in_runs_at_a_constant_rate():
    runs = [replace(record("IFShampoo", t, 1.0, late=2.9), constant=True) for t in TEN]

    def met(runs: list[Record]) -> bool | None:
        found = bars(cells(ADAMW), cells(runs))
        return next(b.met for b in found if (b.letter, b.label) == ("e", "IFShampoo"))

    assert met(runs)
    assert not met([*runs[1:], replace(runs[0], late_ratio=3.1)])
    assert not met([*runs[1:], replace(runs[0], diverged=True)])
    assert not any(b.letter == "e" for b in bars(cells(ADAMW), {}))


def test_settings_are_judged_each():
    tuned = all_tasks("IFShampoo lr=0.003", 0.5)
    runs = [ADAMW, all_tasks("IFShampoo", 2.0), tuned]
    assert not bar("IFShampoo", *runs).met
    assert bar("IFShampoo lr=0.003", *runs).met


def test_small_ratios_keep_a_digit():
    runs = [record("AdamW", "mlp_digits", 1.0), record("SGD", "mlp_digits", 0.0012)]
    assert short(cells(runs), "SGD", "mlp_digits") == "0.001"


def test_what_was_not_run_is_not_measured():
    found = bar("RFShampoo", ADAMW)
    assert (found.met, found.verdict, found.tasks) == (None, "not measured", 0)
    assert verdict.as_markdown([found]) == "\n"
    line = verdict.as_markdown([replace(found, met=True, tasks=1, found="none above")])
    assert line.startswith("- (b) `RFShampoo`, at most 1.05 x AdamW")
    assert line.endswith(": **met** on 1 task; none above\n")
