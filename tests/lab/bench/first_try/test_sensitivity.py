"""Settings changed one at a time: what is run, and which bars follow from records made by hand."""

from __future__ import annotations

import pytest

from lab.bench.first_try.test_first_try_table import record
from rootfree_lab.bench.first_try.entrants import Entrant
from rootfree_lab.bench.first_try.sensitivity import as_markdown, bars, with_changes
from rootfree_lab.bench.first_try.table import cells

WHITENING, ADAMW = Entrant("IFWhitening"), Entrant("AdamW")


def test_each_option_of_an_optimizer_is_changed_around_its_default():
    given = [each.given for each in with_changes([Entrant("IFShampoo", {"lr": 0.02})])]
    assert given[0] == {"lr": 0.02}
    assert given[1:3] == [{"lr": 0.01}, {"lr": 0.04}]
    assert [{"lr": 0.02} | more for more in (
        {"precond_lr": 0.0333}, {"precond_lr": 0.3}, {"damping": 1e-5}, {"damping": 1e-3},
        {"update_every": 1}, {"update_every": 10},
    )] == given[3:]  # fmt: skip
    assert [each.given for each in with_changes([ADAMW])] == [{}, {"lr": 5e-4}, {"lr": 2e-3}]


def test_values_out_of_range_are_left_out():
    given = [each.given for each in with_changes([Entrant("IFWhitening", {"precond_lr": 0.5})])]
    assert {"precond_lr": 0.167} in given
    assert {"precond_lr": 1.5} not in given


def runs(entrant: Entrant, task: str = "vit_cifar10", **losses: float):
    """Of the entrant as it is, 1, and with an option and its value as `option=value: loss`."""
    yield record(entrant.label, task, 1.0)
    for label, loss in losses.items():
        yield record(f"{entrant.name} {label}", task, loss)


def verdicts(*records):
    found = bars(cells([r for each in records for r in each]), [ADAMW, WHITENING])
    return {bar.demand: (bar.verdict, bar.found) for bar in found}


@pytest.mark.parametrize(
    ("loss", "verdict"), [(1.029, "met"), (1.031, "missed"), (0.971, "met"), (0.969, "missed")]
)
def test_other_settings_move_the_loss_by_less_than_three_percent(loss, verdict):
    demand = "other settings by less than 3%"
    word, told = verdicts(runs(WHITENING, **{"damping=1e-05": loss}))[demand]
    assert word == verdict
    assert told == (f"`damping` × 10 on vit_cifar10 {loss - 1:+.1%}" if word == "missed" else
                    f"at most {abs(loss - 1):.1%}")  # fmt: skip


def test_learning_rates_move_the_loss_no_more_than_adamw_s_do():
    demand = "lr on vit_cifar10 by no more than AdamW's"
    adamw = [*runs(ADAMW, **{"lr=0.0005": 1.02, "lr=0.002": 0.9})]  # 10 % is its largest
    rate = WHITENING.effective()["lr"]
    for loss, verdict in ((1.1, "met"), (1.11, "missed"), (0.89, "missed")):
        mine = runs(WHITENING, **{f"lr={2 * rate:g}": loss})
        assert verdicts(adamw, mine)[demand][0] == verdict


def test_a_run_that_diverged_misses_the_bar_and_is_nothing_to_compare_with():
    demand = "other settings by less than 3%"
    found = list(runs(WHITENING, **{"damping=1e-05": 1.0}))
    diverged = [record(r.label, r.task, None) for r in found]
    assert verdicts([found[0], diverged[1]])[demand][0] == "missed"
    assert verdicts([diverged[0], found[1]])[demand][0] == "not measured"


def test_other_packages_have_no_bar():
    soap = Entrant("SOAP")
    assert bars(cells(runs(soap, **{"lr=0.006": 2.0})), [soap]) == []


def test_the_table_has_a_row_for_each_change_that_was_run():
    found = [*runs(ADAMW), *runs(WHITENING, **{"update_every=10": 1.5})]
    lines = as_markdown(found, [ADAMW, WHITENING]).splitlines()
    assert lines[0] == "| changed | vit_cifar10: AdamW | vit_cifar10: IFWhitening |"
    assert lines[2] == "| nothing: loss | 1 ± 0 | 1 ± 0 |"
    assert lines[3] == "| `update_every` = 10 | - | +50.0% |"
    assert lines[4] == ""
