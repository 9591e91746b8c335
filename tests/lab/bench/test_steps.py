"""Measuring: turns, gradients, memory, failures. No test says how long anything takes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

import rootfree
from rootfree_lab.bench import steps
from rootfree_lab.bench.ceilings import Ceilings
from rootfree_lab.bench.contenders import (
    Built,
    Contender,
    NotApplicableError,
    chosen,
    contenders,
    graphed,
    one,
)
from rootfree_lab.bench.floors import Work
from rootfree_lab.bench.iteration import measure_iterations
from rootfree_lab.bench.memory import free_bytes, state_bytes, temporary_bytes
from rootfree_lab.bench.record import StepRow
from rootfree_lab.bench.steps import BESIDE, TOGETHER, measure_steps, with_floor
from rootfree_lab.bench.timing import Gradients, amortised, by_kind, spread
from rootfree_lab.config.reading import ConfigError

CPU = torch.device("cpu")
SHAPES = [(6, 5), (7,)]


def measure(*field: Contender, **options):
    given = {"name": "x", "dtype": torch.float32, "device": CPU, "turns": 3, "seconds": 5.0}
    return measure_steps(field, SHAPES, **{**given, **options})


def broken(error: Exception, *, after: int = 0, name: str = "broken") -> Contender:
    """A contender that raises: when it is built, or after so many steps."""

    def build(ps: list[nn.Parameter]) -> Built:
        if not after:
            raise error
        taken = []

        def step() -> None:
            taken.append(1)
            if len(taken) > after:
                raise error

        return Built(ps, [torch.optim.SGD(ps)], step)

    return Contender(name, build, "peer")


@pytest.fixture
def known_warm_up(monkeypatch):
    """One step, where it takes up to ten by the clock: what fails later fails in its turns."""
    monkeypatch.setattr(steps.Runner, "warm_up", lambda runner, seconds: runner.period())


SGD = Contender("sgd", one(lambda ps: torch.optim.SGD(ps, lr=0.1)), "torch")


def counting(T: int, record: list[torch.Tensor]) -> Contender:
    """A contender that keeps the first gradient of each of its steps."""

    def build(ps: list[nn.Parameter]) -> Built:
        return Built(ps, [torch.optim.SGD(ps)], lambda: record.append(ps[0].grad.clone()))

    return Contender("counting", build, "peer", period=T)


@pytest.mark.parametrize("T", [1, 2, 10])
def test_turns_are_whole_periods(T):
    seen: list[torch.Tensor] = []
    record = measure(counting(T, seen))
    (row,) = record.rows
    assert len(seen) % T == 0
    assert row.ms.samples == 3 * -(-2 // T)  # three turns of two steps, or of one period
    assert (row.refresh_ms is None) == (T == 1)
    assert row.ratio == 1


def test_every_step_has_new_gradients():
    seen: list[torch.Tensor] = []
    measure(counting(1, seen))
    assert len(seen) >= 8
    for before, after in pairwise(seen):
        assert not torch.equal(before, after)
        assert 0.2 < after.norm() / before.norm() < 5
    directions = torch.stack([g.flatten() / g.norm() for g in seen])
    assert (directions @ directions.T).abs().lt(0.9).any()  # not only the sign changes


def test_gradients_are_shared_and_rewritten_in_place():
    gradients = Gradients(SHAPES, torch.bfloat16, CPU)
    a, b = ([nn.Parameter(torch.zeros(s, dtype=torch.bfloat16)) for s in SHAPES] for _ in range(2))
    gradients.attach(a)
    gradients.attach(b)
    old, place = a[0].grad.clone(), a[0].grad.data_ptr()
    gradients.renew_()
    gradients.turn_sign_()
    assert a[0].grad is b[0].grad
    assert a[0].grad.data_ptr() == place
    assert a[0].grad.dtype == torch.bfloat16
    assert not torch.equal(a[0].grad, old)


def test_spread_and_kinds():
    assert spread([3.0]) == spread([3.0, 3.0, 3.0][:1])
    found = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (found.lower, found.median, found.upper, found.samples) == (2, 3, 4, 5)
    periods = [[1.0, 5.0, 1.5], [1.2, 6.0, 1.4], [1.1, 7.0, 1.6]]
    assert amortised(periods).median == pytest.approx((1.2 + 6.0 + 1.4) / 3)
    assert by_kind(periods) == (6.0, pytest.approx((1.1 + 1.5) / 2))
    assert by_kind([[1.0], [2.0]]) == (None, None)


def test_a_contender_that_fails_is_a_row(known_warm_up):
    record = measure(
        SGD,
        broken(NotApplicableError("it cannot"), name="a"),
        broken(ValueError("bad\nsecond line"), name="b"),
        broken(RuntimeError("gone"), after=4, name="c"),
    )
    assert [row.failure for row in record.rows] == [
        None,
        "it cannot",
        "ValueError: bad",
        "RuntimeError: gone",
    ]
    assert record.rows[0].ms is not None
    assert all(row.ms is None and row.ratio is None for row in record.rows[1:])


@pytest.mark.parametrize("room", [1e-3, 1e12], ids=[TOGETHER, BESIDE])
def test_a_reference_that_fails_leaves_no_ratios(room):
    other = Contender("other", SGD.build, "torch", room=room)
    record = measure(broken(ValueError("bad")), other)
    assert record.rows[0].failure == "ValueError: bad"
    assert record.rows[1].ms is not None
    assert record.rows[1].ratio is None


def test_what_does_not_fit_together_is_timed_beside_the_reference(known_warm_up):
    large = [Contender(name, SGD.build, "torch", room=1e12) for name in ("a", "b")]
    record = measure(
        SGD, *large, broken(ValueError("bad")), broken(ValueError("x"), after=4, name="d")
    )
    assert record.arrangement == BESIDE
    reference, a, b, bad, late = record.rows
    assert reference.ratio == 1
    assert reference.ms.samples == 4 * a.ms.samples  # beside each of them
    assert a.ratio > 0
    assert b.ratio > 0
    assert (bad.failure, late.failure) == ("ValueError: bad", "ValueError: x")
    alone = measure(Contender("a", SGD.build, "torch", room=1e12))
    assert alone.arrangement == BESIDE
    assert alone.rows[0].ratio == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), MemoryError("x")])
def test_out_of_memory_among_all_is_tried_again_alone(error):
    tries = []

    def build(ps: list[nn.Parameter]) -> Built:
        tries.append(1)
        if len(tries) == 1:
            raise error
        return SGD.build(ps)

    record = measure(SGD, Contender("large", build, "peer"))
    assert record.arrangement == TOGETHER
    assert record.rows[1].failure is None
    assert record.rows[1].ratio > 0
    again = measure(SGD, broken(error))
    assert again.rows[1].failure == steps.OUT_OF_MEMORY


def test_a_run_that_diverges_says_so():
    record = measure(Contender("sgd", one(lambda ps: torch.optim.SGD(ps, lr=1e38)), "torch"))
    assert record.rows[0].note is None or "finite" in record.rows[0].note
    blown = Contender("nan", one(lambda ps: torch.optim.SGD(ps, lr=float("inf"))), "torch")
    assert measure(blown).rows[0].note == "parameters were no longer finite"


def test_a_floor_that_cannot_be_counted_is_a_note():
    def floor(built: Built) -> None:
        raise KeyError("factor0")

    (row,) = measure(Contender("sgd", SGD.build, "torch", floor=floor)).rows
    assert row.note == "no floor, KeyError: 'factor0'"
    assert row.ms is not None
    assert row.floor_ms is None


def test_floors_of_a_row():
    """T = 2, a copy of 2 TB/s, products of 100 TFLOP/s: 3 ms of products, then 1 ms of bytes."""
    row = StepRow("x", "rootfree", 2, ms=spread([4.0]))
    work = Work(2e9, 2e9, refresh_flops=3e11, plain_flops=1e10, matmul_dtype=torch.bfloat16)
    found = with_floor(row, work, Ceilings(copy=2.0, bf16=100.0, fp32=10.0))
    assert found.floor_ms == pytest.approx((3.0 + 1.0) / 2)
    assert found.times_floor == pytest.approx(2.0)
    assert found.terabytes_per_second == pytest.approx(0.5)
    assert found.teraflops_per_second == pytest.approx((3e11 + 1e10) / 2 / 4e9)
    assert found.matmul_dtype == "bfloat16"


def test_state_counts_memory_once_wherever_it_is_kept():
    p = nn.Parameter(torch.randn(8, 4))
    p.grad = torch.randn_like(p)

    class Holder:
        def __init__(self) -> None:
            self.matrix = torch.zeros(100)

    optimizer = torch.optim.SGD([p], lr=0.1)
    assert state_bytes([optimizer], [p]) == 0
    slab = torch.zeros(64)
    optimizer.state[p] = {"a": slab[:32], "b": slab[32:], "n": 3, "again": p.grad}
    optimizer.beside = [{"x": (Holder(),)}]
    assert state_bytes([optimizer], [p]) == 4 * (64 + 100)
    ours = rootfree.RFRMSprop([nn.Parameter(torch.randn(10))], lr=0.1, batch_size=1)
    # Here the parameter is not known; eight bytes count steps, four those that were left out.
    assert state_bytes([ours], []) == 8 * 10 + 4 * 10 + 8 + 4


def test_memory_of_the_machine():
    assert free_bytes(CPU) > 1e8
    assert temporary_bytes(lambda: None, CPU) is None


def test_names_and_patterns():
    table = contenders()
    assert [c.name for c in chosen([], [], default=table, graph=False)] == list(table)
    names = [
        c.name for c in chosen(["RFRMSprop", "IFShampoo*"], ["*T=10"], default=[], graph=False)
    ]
    tails = ["update RMS T=2", "bf16 state T=2", "Nesterov T=2"]
    shampoo = ["T=1", "T=2", "low memory T=2", *tails, "KFAC T=2"]
    assert names == ["RFRMSprop", *(f"IFShampoo {kind}" for kind in shampoo)]
    names = [c.name for c in chosen(["RFRMSprop", "torch Muon"], [], default=[], graph=True)]
    assert names == ["RFRMSprop", "torch Muon", "RFRMSprop, graph"]
    with pytest.raises(ConfigError, match=r"--optimizer: the optimizer 'Adam' .*torch AdamW fused"):
        chosen(["Adam"], [], default=[], graph=False)
    with pytest.raises(ConfigError, match="--without: the optimizer 'x'"):
        chosen([], ["x"], default=table, graph=False)
    with pytest.raises(ConfigError, match="leaves no optimizer"):
        chosen([], ["*"], default=table, graph=False)


def test_muon_says_where_it_does_not_apply():
    with pytest.raises(NotApplicableError, match=r"2-D parameters only: 10\.0%"):
        contenders()["torch Muon"].build(
            [nn.Parameter(torch.zeros(9, 2, 2, 5)), nn.Parameter(torch.zeros(4, 5))]
        )


def test_graphs_wait_for_a_gpu():
    row = graphed(contenders()["RFRMSprop"])
    record = measure(row)
    assert record.rows[0].failure == "CUDA graphs need a GPU"


def test_a_peer_that_is_not_installed_is_named(monkeypatch):
    import sys

    table = contenders()
    for module in ("sirfshampoo", "pytorch_optimizer", "heavyball", "distributed_shampoo"):
        monkeypatch.setitem(sys.modules, module, None)
    ours = {"Shampoo T=2"}  # the laboratory's
    field = [c for c in table.values() if c.family == "peer" and c.name not in ours]
    record = measure(*field)
    for row in record.rows:
        assert "pip install" in row.failure or "not on PyPI" in row.failure


def test_iterations():
    def failing(ps: list[nn.Parameter]) -> Built:
        raise ValueError("bad")

    field = [SGD, contenders()["IFShampoo T=2"], Contender("bad", failing, "peer"),
             broken(RuntimeError("late"), after=3, name="late")]  # fmt: skip
    record = measure_iterations(field, "small_cnn", batch=2, device=CPU, turns=2, seconds=5.0)
    sgd, ours, bad, late = record.rows
    assert sgd.ratio == 1
    for row in (sgd, ours):
        parts = (row.forward_ms, row.backward_ms, row.optimizer_ms)
        assert all(part > 0 for part in parts)
        assert row.peak_bytes is None  # on a CPU
    assert (bad.failure, late.failure) == ("ValueError: bad", "RuntimeError: late")
    assert record.autocast == "off"
