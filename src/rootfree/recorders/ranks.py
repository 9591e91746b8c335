"""The ranks that average gradients, and what recorders ask of all of them."""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rootfree.placement.data_parallel import data_parallel_ranks
from rootfree.placement.processes import device_group, host_group, initialised
from rootfree.placement.unsharded import gradient_divisor


class GradientRanks:
    """The ranks of a model.

    `group`: "world" (they are found from the model), a process group or a mesh; None: this process
    alone.
    """

    def __init__(self, model: nn.Module, group: Any = "world") -> None:
        self._model, self._given = model, group
        self._group: Any = None  # on the devices
        self._hosts: Any = None  # between the hosts: no device waits for it
        self._numbers = [0]  # of the ranks in the world

    def meet(self) -> None:
        """Find the other ranks; all of them must call it."""
        if self._given is None or not initialised() or self._group is not None:
            return
        given = None if isinstance(self._given, str) else self._given
        self._numbers = data_parallel_ranks(self._model, given)
        if self.size > 1:
            is_group = isinstance(given, torch.distributed.ProcessGroup)
            self._group = given if is_group else device_group(self._numbers)
            self._hosts = host_group(self._numbers)

    @property
    def size(self) -> int:
        """1 when there is nothing to reduce."""
        return len(self._numbers)

    @property
    def rank(self) -> int:
        """0 when there is nothing to reduce."""
        self.meet()
        return self._numbers.index(torch.distributed.get_rank()) if self.size > 1 else 0

    @property
    def divisor(self) -> float:
        """By what the sum of the ranks' gradients is divided."""
        return gradient_divisor(self._model, self.size)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks, in place."""
        works = [torch.distributed.all_reduce(t, group=self._group, async_op=True) for t in tensors]
        for work in works:
            work.wait()

    def sums(self, numbers: Sequence[int]) -> list[int]:
        """The sum of each number over the ranks, made on the hosts."""
        total = torch.tensor(numbers, device="cpu")
        torch.distributed.all_reduce(total, group=self._hosts)
        return [int(number) for number in total]

    def unions(self, items: Collection[Any], *sets: Container[Any]) -> list[set[Any]]:
        """For each of the sets: the items that are in it on any rank."""
        counts = iter(self.sums([int(item in each) for each in sets for item in items]))
        return [{item for item in items if next(counts) > 0} for _ in sets]

    def first(self, problem: str | None) -> str | None:
        """The problem of the first rank that has one."""
        if self.sums([int(problem is not None)]) == [0]:
            return None
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, problem, group=self._hosts)
        number, text = next((n, text) for n, text in zip(self._numbers, found, strict=True) if text)
        return f"{text} (on rank {number})"

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        found = torch.tensor(number, dtype=torch.float64, device="cpu")
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return float(found)

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, which may have different numbers of them."""
        if self.size == 1:
            return rows
        mine = [len(rows) if r == self.rank else 0 for r in range(self.size)]
        counts = self.sums(mine)
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        torch.distributed.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
