"""accelerate: prepare, accumulate, clip, save_state and load_state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rootfree
from integrations.needs import needs

pytestmark = [pytest.mark.slow, needs("accelerate")]

BATCH, STEPS, TOGETHER = 4, 6, 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS * TOGETHER * BATCH, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, (3 * x[:, 0].sigmoid()).long())


def by_hand() -> list[torch.Tensor]:
    model = network()
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=BATCH * TOGETHER)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH * TOGETHER)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return [p.detach() for p in model.parameters()]


def by_accelerate(folder, *, steps=range(STEPS), load=False, save=False):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=TOGETHER)
    model = network()
    optimizer = rootfree.IFShampoo(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rootfree.track_batch_size(model, optimizer)  # the wrapper is looked through
    if load:
        accelerator.load_state(str(folder))
    for i, (x, y) in enumerate(loader):
        if i // TOGETHER not in steps:
            continue
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert optimizer.optimizer.batch_size == BATCH * TOGETHER
    if save:
        accelerator.save_state(str(folder))
    return [p.detach() for p in model.parameters()]


def test_micro_batches_do_what_whole_batches_do(tmp_path):
    for a, b in zip(by_accelerate(tmp_path), by_hand(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_saved_state_continues_bit_for_bit(tmp_path):
    through = by_accelerate(tmp_path)
    by_accelerate(tmp_path, steps=range(3), save=True)
    resumed = by_accelerate(tmp_path, steps=range(3, STEPS), load=True)
    assert all(map(torch.equal, through, resumed))


def test_batch_size_set_on_the_wrapper_is_noticed():
    """`wrapper.batch_size = B` does not reach the optimizer; the step says that B is missing."""
    from accelerate import Accelerator

    model = network()
    optimizer = Accelerator(cpu=True).prepare(rootfree.RFRMSprop(model.parameters()))
    optimizer.batch_size = BATCH
    model(torch.randn(BATCH, 4)).mean().backward()
    with pytest.raises(RuntimeError, match="batch_size is not set"):
        optimizer.step()


def test_there_is_a_switch_to_the_sharding_that_keeps_matrices():
    """As docs/troubleshooting.md says; FSDP1 is refused."""
    from accelerate import FullyShardedDataParallelPlugin

    assert FullyShardedDataParallelPlugin(fsdp_version=2).fsdp_version == 2
