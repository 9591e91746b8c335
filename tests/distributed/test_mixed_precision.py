"""FSDP2 with layers in bfloat16: the optimizer has float32, as docs/mixed_precision.md says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import rootfree


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
def test_shards_gradients_and_state_are_float32():
    seen = []
    model = nn.Linear(8, 8)
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model, mp_policy=policy)
    optimizer = rootfree.IFWhitening(model.parameters())
    before = model.weight.full_tensor().clone()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    assert seen == [torch.bfloat16]
    tensors = [model.weight, model.weight.grad, *optimizer.state[model.weight].values()]
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float32}
    assert (model.weight.full_tensor() != before).float().mean() > 0.9
