"""FSDP1 makes vectors of all parameters: matrix methods refuse them, diagonal ones are as alone."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

import rootfree
from distributed.flattened import TURNS, trained
from distributed.launch import results

SHARDED, WHOLE = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD


@pytest.fixture
def world_of_two():
    """A process group whose other rank is made up."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 2))


def flat(model, strategy, *, use_orig_params):
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    with warnings.catch_warnings(action="ignore"):  # of torch: FSDP1 is on its way out
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


@pytest.mark.usefixtures("world_of_two")
@pytest.mark.parametrize(
    ("strategy", "kept"), [(SHARDED, False), (SHARDED, True), (WHOLE, False)], ids=str
)
def test_flattened_parameters_are_refused(strategy, kept):
    model = flat(network(), strategy, use_orig_params=kept)
    number = len(list(model.parameters()))
    message = rf"shapes of their layers for IFWhitening, .*\(FSDP1\) flattened {number} of {number}"
    # parameter_groups would leave all of them to AdamW
    for params in (model.named_parameters(), rootfree.parameter_groups(model)):
        with pytest.raises(ValueError, match=message):
            rootfree.IFWhitening(params)
    for mode in ("skip", "raise"):
        with pytest.raises(ValueError, match=f"nonfinite must be 'propagate', got {mode!r}"):
            rootfree.RFRMSprop(model.parameters(), nonfinite=mode)


@pytest.mark.usefixtures("world_of_two")
def test_what_is_flattened_later_is_refused_by_the_step():
    model = network()
    optimizer = rootfree.IFWhitening(model.parameters())
    wrapped = flat(model, SHARDED, use_orig_params=True)
    wrapped(torch.ones(4, 8)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="no matrix is left to precondition"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.usefixtures("world_of_two")
def test_parameters_that_keep_their_shapes_are_taken():
    """As FSDP1 does where nothing is sharded, which it also does in a world of one rank."""
    model = flat(network(), WHOLE, use_orig_params=True)
    groups = rootfree.parameter_groups(model)
    assert any(group.get("companion") for group in groups)
    optimizer = rootfree.IFWhitening(groups)
    assert "dense 16 x dense 8" in optimizer.summary()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()


@pytest.mark.slow
def test_a_diagonal_method_does_what_it_does_in_one_process(tmp_path):
    alone = trained(None)
    for ranks in results("distributed.flattened", (2,) * len(TURNS), tmp_path):
        for params in ranks:
            torch.testing.assert_close(params, alone, rtol=1e-12, atol=1e-13)
