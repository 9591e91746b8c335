"""Two and four ranks get what one process gets, under every kind of parallelism."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from distributed import by_hand, same_result
from distributed.models import network, weights
from distributed.program import FIRST, SECOND, ranks  # noqa: F401  (a fixture)
from distributed.same_result import RUNS, WORLDS, alone

pytestmark = pytest.mark.slow

CASES = [(world, *case) for world in WORLDS for case in RUNS[world]]


@pytest.fixture(scope="module")
def found(ranks):  # noqa: F811
    return {4: ranks[FIRST], 2: ranks[SECOND]}


@pytest.fixture(scope="module")
def expected():
    return {method: alone(method) for method in {case[1] for case in CASES}}


def difference(mine, theirs):
    return max((mine[key] - theirs[key]).abs().max().item() for key in theirs)


def test_every_rank_has_what_one_process_has(found, expected):
    start = weights(network())
    for world, method, mode in CASES:
        assert difference(start, expected[method]) > 1e-3
        for rank in found[world]:
            assert difference(rank[method, mode]["weights"], expected[method]) < 1e-10, (
                world, method, mode,
            )  # fmt: skip


def test_fp32_differs_by_rounding(found):
    reference = alone("IFShampoo", torch.float32)
    for rank in found[4]:
        assert 0 < difference(rank["fp32"], reference) < 1e-6


def test_bytes_sent_are_those_that_must_be(found):
    N = sum(p.numel() for name, p in network().named_parameters() if "unused" not in name)
    for world in WORLDS:
        for mode in (case[1] for case in RUNS[world] if case[0] == "IFShampoo"):
            runs = [rank["IFShampoo", mode] for rank in found[world]]
            for each in runs:
                sent = {what: each["sent"].get(what, 0) for what in each["expected"]}
                steps = len(same_result.STEPS)
                assert sent == {what: steps * n for what, n in each["expected"].items()}
            total = sum(sum(each["expected"].values()) for each in runs)
            if mode == "ddp sharded":  # every block goes to everybody else, and nothing more
                assert total == 8 * N * (world - 1)
            elif mode == "ddp":
                assert total == 0
            elif mode == "fsdp2":  # at most all gradients and all directions
                assert 0 < total < 2 * 8 * N


def test_state_is_divided(found):
    for rank in found[4]:
        for mode in ("ddp sharded", "fsdp2"):
            (total,) = [
                line.split()
                for line in rank["IFShampoo", mode]["summary"].splitlines()
                if line.startswith("total")
            ]
            here, everywhere = (int(number.replace(",", "")) for number in total[-2:])
            assert everywhere / 8 < here < everywhere / 2
        assert "blocks are shared by 4 ranks" in rank["IFShampoo", "fsdp2"]["summary"]
        assert "bytes here" in rank["RFRMSprop", "fsdp2"]["summary"]


def test_replicas_exchange_nothing_between_them(found, expected):
    for rank in found[4]:
        assert rank["two replicas"]["world"] == 2
        assert difference(rank["two replicas"]["weights"], expected["IFShampoo"]) < 1e-10


@pytest.mark.parametrize("kind", by_hand.MISSING)
def test_missing_gradients(found, kind):
    """Where one rank lacks its part that part is zero, unless another rank has it too."""
    params, steps = by_hand.missing_alone(kind)
    for rank in found[4]:
        mine, counts = rank["missing"][kind]
        assert counts == steps == [3, 2, 3]
        for a, b in zip(mine, params, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-7)


@pytest.mark.parametrize("method", ["RFRMSprop", "IFShampoo"])
def test_rounded_state_is_that_of_one_process(found, method):
    params = by_hand.by_hand("whole")
    optimizer = same_result.in_bf16(method, params)
    for step in range(4):
        by_hand.set_gradients(params, step)
        optimizer.step()
    for rank in found[4]:
        for kind in ("sharded", "whole"):
            weights_there, state = rank["bf16"][method, kind]
            for n, (p, there) in enumerate(zip(params, weights_there, strict=True)):
                torch.testing.assert_close(there, p.detach(), rtol=0, atol=1e-6)
                for key, tensor in optimizer.state_dict()["state"][n].items():
                    assert torch.equal(state[n][key], tensor), (kind, n, key)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_directions_by_kernels(found):
    """They are those of the rules up to the rounding of the products, and halves are not saved."""
    (params, state, _), start = same_result.kernels("whole"), by_hand.by_hand("whole")
    for rank in found[4]:
        there, saved, _ = rank["kernels"]
        for n, (p, q, before) in enumerate(zip(params, there, start, strict=True)):
            assert (p - q).norm() < 0.03 * (p - before).norm()
            assert saved[n].keys() == state[n].keys()
            for key in ("block0.factor0", "block0.factor1"):
                assert (saved[n][key] - state[n][key]).norm() < 0.01 * state[n][key].norm()
    assert any(rank["kernels"][2] for rank in found[4])


def test_what_is_not_finite_on_one_rank_is_left_out_on_all(found):
    for rank in found[4]:
        assert rank["not finite"] == dict.fromkeys(by_hand.NOT_FINITE, (True, 1))


def test_a_copy_goes_on_like_the_original(found):
    assert all(rank["copy"] for rank in found[4])


def test_boxes_are_where_torch_puts_shards(found):
    for rank in found[4]:
        for whole, part, (offsets, shape) in rank["boxes"]:
            if isinstance(whole, tuple):
                whole = torch.arange(float(torch.Size(whole).numel())).view(whole)
            for axis, (start, d) in enumerate(zip(offsets, shape, strict=True)):
                whole = whole.narrow(axis, start if d else 0, d)
            assert torch.equal(whole, part)
