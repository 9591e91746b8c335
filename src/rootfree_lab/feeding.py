"""What the training loop is fed: batches of any kind of data in one form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rootfree_lab import data
from rootfree_lab.config import TrainConfig
from rootfree_lab.config_reading import ConfigError


@dataclass(frozen=True)
class Batch:
    """Arguments of the model, and targets for its outputs (the selected ones of a graph)."""

    inputs: tuple[Tensor, ...]
    target: Tensor
    select: Tensor | None = None


class Feed:
    """The training batches, epoch after epoch, from any position.

    All randomness of an epoch (order, augmentation) comes from one generator. So its state at the
    epoch's start and the number of batches taken since are the whole position.
    """

    def __init__(
        self, dataset: Any, config: TrainConfig, device: torch.device, *, augment: bool
    ) -> None:
        self._generator = torch.Generator().manual_seed(config.seed)
        self._graph: _GraphPass | None = None
        if dataset.kind == "graph":
            self._graph = _GraphPass(dataset.graph, dataset.graph.train, device)
        else:
            if dataset.kind == "text" and config.context < 1:
                raise ConfigError("train.context must be at least 1 for text, got 0")
            self._batches = data.Batches(
                dataset.train,
                dataset,
                batch_size=config.batch_size,
                device=device,
                generator=self._generator,
                augment=augment,
                context=config.context,
                drop_last=True,
            )
        self._begin_epoch()

    def __len__(self) -> int:
        """Batches an epoch."""
        return 1 if self._graph is not None else len(self._batches)

    def _begin_epoch(self, taken: int = 0) -> None:
        self._start = self._generator.get_state()
        self._taken = taken
        if self._graph is None:
            self._iterator = self._batches.starting_at(taken)

    def take(self) -> Batch:
        """The next batch; a new epoch begins where one ends."""
        if self._taken == len(self):
            self._begin_epoch()
        self._taken += 1
        if self._graph is not None:
            return self._graph.batch
        x, y = next(self._iterator)
        return Batch((x,), y)

    def peek_target(self) -> Tensor:
        """Targets of a graph's one batch."""
        if self._graph is None:
            raise TypeError("only a graph's batch is known beforehand")
        return self._graph.batch.target

    def position(self) -> dict[str, Any]:
        """Where in the data the run is, for a checkpoint."""
        return {"generator": self._start, "taken": self._taken}

    def seek(self, position: dict[str, Any]) -> None:
        """Go to a position: the epoch's randomness is drawn again, its batches are not made."""
        self._generator.set_state(position["generator"])
        self._begin_epoch(position["taken"])


class TestFeed:
    """The test set, the same batches each time."""

    __test__ = False  # not a test case

    def __init__(self, dataset: Any, config: TrainConfig, device: torch.device) -> None:
        self._graph: _GraphPass | None = None
        if dataset.kind == "graph":
            self._graph = _GraphPass(dataset.graph, dataset.graph.test, device)
            return
        self._batches = data.Batches(
            dataset.test,
            dataset,
            batch_size=config.batch_size,
            device=device,
            generator=torch.Generator(),
            augment=False,
            context=config.context,
            drop_last=False,
            shuffle=False,
        )

    def __iter__(self) -> Iterator[Batch]:
        if self._graph is not None:
            yield self._graph.batch
            return
        for x, y in self._batches:
            yield Batch((x,), y)


class _GraphPass:
    """A graph is one batch: all nodes go through the model, the chosen ones have targets."""

    def __init__(self, graph: Any, nodes: Tensor, device: torch.device) -> None:
        labels = graph.labels.to(device)
        select = nodes.to(device)
        select = select[labels[select] >= 0]  # Citeseer has nodes without a label
        self.batch = Batch(
            (graph.features.to(device), graph.edges.to(device)),
            labels[select],
            select,
        )
