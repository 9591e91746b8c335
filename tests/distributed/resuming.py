"""A training that survives the death of a rank; started by killing.py.

At the first start rank 1 dies in the middle of a step, at the second one while it writes its part
of a checkpoint.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp

from distributed.checkpoints import restore, state_of
from distributed.methods import if_shampoo
from distributed.models import data_ranks, fsdp2, network, train, weights
from rootfree.placement.placed_stack import PlacedStack

STEPS, EVERY, LAST_OF_RANK_1 = 7, 2, 5


def trained(folder: Path | None = None) -> dict[str, torch.Tensor]:
    """All steps, from the last checkpoint that is whole."""
    model = fsdp2(network())
    optimizer = if_shampoo(model.parameters())
    latest = None if folder is None else folder / "latest"
    first = 0
    if latest is not None and latest.exists():
        first = int(latest.read_text())
        restore(model, optimizer, latest.with_name(f"step-{first}"), flat=False)
    for step in range(first, STEPS):
        train(model, optimizer, range(step, step + 1), part=data_ranks("fsdp2"))
        if latest is not None and (step + 1) % EVERY == 0:
            there = latest.with_name(f"step-{step + 1}")
            dcp.save(state_of(model, optimizer, flat=False), checkpoint_id=there)
            if dist.get_rank() == 0:  # only now does it count
                new = latest.with_suffix(".new")
                new.write_text(str(step + 1))
                new.replace(latest)
    return weights(model)


def dying(self: PlacedStack, *arguments: Any) -> None:
    """The tail of a step, of which rank 1 does not see that of its last one."""
    dying.steps += 1
    if dying.steps == LAST_OF_RANK_1 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    descend(self, *arguments)


descend, dying.steps = PlacedStack.descend_, 0


def dying_in_save(descriptor: int) -> None:
    """The end of writing a part of a checkpoint, which rank 1 does not come to."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    to_disk(descriptor)


to_disk = os.fsync


def main(folder: str) -> None:
    """What a rank does at each start."""
    torch.set_num_threads(1)
    # By files: after a restart torchrun's store may still have the addresses of the dead.
    start = os.environ["TORCHELASTIC_RESTART_COUNT"]
    address = (Path(folder) / f"rendezvous-{start}").as_uri()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    if start == "0":
        PlacedStack.descend_ = dying
    elif start == "1":
        os.fsync = dying_in_save  # DCP calls it for every file that it has written
    found = trained(Path(folder))
    if dist.get_rank() == 0:
        torch.save(found, Path(folder) / "weights.pt")
    dist.barrier()
