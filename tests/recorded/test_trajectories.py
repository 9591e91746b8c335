"""Every optimizer goes where it went when the trajectories were recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recorded.cases import CASES, Case
from recorded.probe import probe
from recorded.trajectories import one_thread, read, run

#: Of a parameter's largest entry, on machines whose products are rounded differently.
TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def recorded() -> tuple[bool, dict[str, dict[str, Tensor]]]:
    """Whether this machine rounds like the one that recorded, and what was recorded."""
    with one_thread():
        mine = probe()
    theirs, cases = read()
    return mine == theirs, cases


def differing(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, exact: bool
) -> dict[str, float]:
    """Largest difference, relative to the largest entry, of the parameters that do not agree."""
    result = {}
    for name, p in found.items():
        error = float((p - wanted[name]).abs().max() / wanted[name].abs().max())
        if not (torch.equal(p, wanted[name]) if exact else error <= TOLERANCE):
            result[name] = error
    return result


def by_name(case: Case) -> str:
    return case.name.replace(" ", "-")


def test_every_case_is_recorded_once(recorded):
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert set(names) == set(recorded[1])


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_the_trajectory_is_the_recorded_one(case, recorded):
    exact, wanted = recorded
    found = run(case)
    assert found.keys() == wanted[case.name].keys()
    assert all(p.isfinite().all() for p in found.values())
    how = (
        "bit by bit, as this machine's arithmetic is that of the one that recorded"
        if exact
        else f"to {TOLERANCE:g}, as this machine's arithmetic is not that of the one that recorded"
    )
    wrong = differing(found, wanted[case.name], exact=exact)
    assert not wrong, f"compared {how}; relative differences: {wrong}"


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_the_comparison_sees_every_hyper_parameter(case):
    """Each one, a billionth smaller, changes the bits: nothing that a case sets is idle."""
    usual = run(case)
    for name, value in case.options.items():
        if isinstance(value, float) and value > 0:
            changed = run(replace(case, options={**case.options, name: value * (1 - 1e-9)}))
            assert differing(changed, usual, exact=True), name
