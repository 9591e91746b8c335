"""One of two data-parallel ranks; run as a script by test_two_ranks.py.

Arguments: rank, address of the process group, file for the results.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rootfree
from recorders.every_recorder import RECORDERS, curvatures
from recorders.networks import labels, normal, seeded
from rootfree.recorders import HutchinsonDiagonal, KFACRecorder, MonteCarloFisherRecorder

HALF, CLASSES = 4, 3


class Network(nn.Module):
    """One layer is used by the first half of the batch only: one rank never comes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 2)
        self.first = nn.Linear(6, 5)
        self.seldom = nn.Linear(5, 5)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor, detour: bool) -> Tensor:
        x = torch.tanh(self.first(torch.tanh(self.conv(x)).flatten(1)))
        return self.head(torch.tanh(self.seldom(x)) if detour else x)


def half_of_the_batch(k: int) -> tuple[Tensor, Tensor]:
    rows = slice(k * HALF, (k + 1) * HALF)
    return normal(2 * HALF, 2, 3)[rows], labels(2 * HALF, CLASSES)[rows]


def main(rank: int, address: str, path: str) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    results = {}
    x, y = half_of_the_batch(rank)
    for name, make in RECORDERS.items():
        inner = seeded(Network)
        model = DistributedDataParallel(inner, find_unused_parameters=True)
        recorder = make(inner)
        with recorder:
            z = model(x, rank == 0)
            recorder.backward(nn.functional.cross_entropy(z, y), z)
        results[name] = curvatures(recorder, inner, batch_size=2 * HALF)
    # The draws of rank r are those of a process alone with the seed r.
    for kind, options in ((MonteCarloFisherRecorder, {"loss": "mse"}), (HutchinsonDiagonal, {})):
        for where, seed, group in (("world", 0, "world"), ("alone", rank, None)):
            inner = seeded(Network)
            recorder = kind(inner, seed=seed, process_group=group, **options)
            with recorder:
                z = inner(x, True)
                recorder.backward(z.square().mean(), z)
            recorder.check(list(inner.parameters()))
            B = z.numel() * (2 if group else 1)
            H = recorder.of(inner.head.weight, batch_size=B)
            results[f"{kind.__name__} {where}"] = H.V if hasattr(H, "V") else H.h
    inner = seeded(Network)
    model = DistributedDataParallel(inner)
    recorder = KFACRecorder(inner)
    optimizer = rootfree.IFShampoo(inner.parameters(), batch_size=2 * HALF, curvature=recorder)
    for _ in range(3):
        optimizer.zero_grad()
        with recorder:
            nn.functional.cross_entropy(model(x, True), y).backward()
        optimizer.step()
    results["trained"] = {n: [p.detach()] for n, p in inner.named_parameters()}
    torch.save(results, path)
    dist.barrier()
    # gloo's threads now and then abort the shutdown of the interpreter; there is nothing to close.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
