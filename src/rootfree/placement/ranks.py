"""Groups of ranks, and how they check that they agree.

Ranks that disagree on what comes next would wait for each other forever, or compute different
things. Before every exchange they compare digests on the host. If these differ, every rank gets the
contents of all others, and all raise the same error.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from rootfree.placement.processes import (
    PATIENCE,
    device_group,
    digest,
    drop_groups,
    host_group,
    initialised,
)
from rootfree.placement.traffic import Traffic

#: the label of an error that keeps a rank from what the others are about to do
PROBLEM = "problem"


class PlacementError(RuntimeError):
    """Ranks disagree, or one of them is gone."""


def difference(found: Sequence[tuple[int, dict[str, Any]]], *, about: str) -> str | None:
    """What is not the same on all ranks, in words; None: all is.

    `found`: ranks, each with its labels and values.
    """
    for rank, each in found:
        if PROBLEM in each:
            return f"rank {rank}: {each[PROBLEM]}"
    (first, expected), *others = found
    for key in dict.fromkeys(key for _, each in found for key in each):
        for rank, each in others:
            if each.get(key) != expected.get(key):
                return (
                    f"{about}: {key} must be the same on all ranks, got {expected.get(key)!r} on "
                    f"rank {first} and {each.get(key)!r} on rank {rank}"
                )
    return None


class Ranks:
    """A group of ranks with their numbers in it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = list(ranks)
        self.group = device_group(ranks)
        host_group(ranks)  # made now, while all ranks are at this point
        self.me = self.ranks.index(torch.distributed.get_rank())
        self.traffic = Traffic()  # of this rank, in steps
        self.load = [0.0] * len(self.ranks)  # of each rank, from the blocks that it owns
        self._mesh: Any = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def is_everyone(self) -> bool:
        """Whether there are no other ranks."""
        return self.world == torch.distributed.get_world_size()

    @property
    def _hosts(self) -> Any:
        return host_group(self.ranks)

    def mesh(self, device_type: str) -> Any:
        """The ranks as a mesh of one axis, for state of parameters without a mesh."""
        from torch.distributed.device_mesh import DeviceMesh

        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(self.group, device_type)
        return self._mesh

    def differ(self, what: str, content: Any) -> list[Any] | None:
        """The contents of all ranks if they differ; None: all are the same.

        `what`: what the rank is about to do; an error if that differs.
        """
        if not initialised():
            drop_groups()  # closes connections, so that waiting ranks notice
            raise PlacementError(f"{what} needs the process group, which was destroyed")
        if self.world == 1:
            return None
        words = torch.tensor([digest(what), digest(content)], device="cpu")
        extremes = torch.cat([words, -words])
        largest = torch.distributed.ReduceOp.MAX
        self._await(
            torch.distributed.all_reduce(extremes, largest, group=self._hosts, async_op=True), what
        )
        if torch.equal(extremes[:2], -extremes[2:]):
            return None
        found = self.gathered((what, content))
        doing = [each for each, _ in found]
        if len({*doing}) > 1:
            told = ", ".join(f"rank {r}: {each}" for r, each in zip(self.ranks, doing, strict=True))
            raise PlacementError(f"the ranks are not at the same point of the program ({told})")
        return [each for _, each in found]

    def _await(self, work: Any, what: str) -> None:
        """Wait for the others; warn if that takes long, and raise an error if it fails."""
        try:
            try:
                work.wait(timedelta(seconds=PATIENCE))
            except RuntimeError:
                if work.is_completed():  # it failed
                    raise
                warnings.warn(
                    f"rank {self.ranks[self.me]} has waited {PATIENCE:.0f} seconds for other ranks "
                    f"to come to {what}, which all of them must do",
                    stacklevel=2,
                )
                work.wait()
        except RuntimeError as error:
            raise PlacementError(
                f"{what}: another rank is gone, or does not come: {error}"
            ) from error

    def gathered(self, content: Any) -> list[Any]:
        """The contents of all ranks."""
        if self.world == 1:
            return [content]
        found: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(found, content, group=self._hosts)
        return found

    def check_agree(self, what: str, content: dict[str, Any], *, about: str) -> None:
        """Raise the same error on all ranks if their contents differ."""
        found = self.differ(what, content)
        if found is not None:
            self.check_alike(found, about=about)

    def check_alike(self, found: list[dict[str, Any]], *, about: str) -> None:
        """Raise an error that names the first difference between ranks, if there is one."""
        problem = difference(list(zip(self.ranks, found, strict=True)), about=about)
        if problem is not None:
            raise PlacementError(problem)

    def largest_(self, flag: torch.Tensor) -> None:
        """Replace a number by the largest of the ranks' numbers."""
        if self.world > 1:
            group = self._hosts if flag.device.type == "cpu" else self.group
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=group)

    def sum_(self, numbers: torch.Tensor) -> None:
        """Replace numbers by their sums over the ranks."""
        if self.world > 1:
            self.traffic.sent["sums"] += numbers.nbytes
            self.traffic.received["sums"] += numbers.nbytes
            torch.distributed.all_reduce(numbers, group=self.group)
