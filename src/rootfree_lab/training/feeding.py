"""The batches of a training loop, in one form for every kind of data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rootfree_lab import data
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.config.settings import TrainConfig

# How many times larger the batches of a test are than those of training.
_TEST_BATCHES = 4


@dataclass(frozen=True)
class Batch:
    """Arguments of the model, and targets for its outputs (the selected ones of a graph)."""

    inputs: tuple[Tensor, ...]
    target: Tensor
    select: Tensor | None = None


@dataclass(frozen=True)
class Source:
    """The batches of an epoch: their number, the loss terms of each, and an iterator over them."""

    count: int
    terms: int
    starting_at: Callable[[int], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.starting_at(0)


class Feed:
    """The training batches, epoch after epoch, from any position.

    All randomness of an epoch (order, augmentation) comes from one generator. So its state at the
    epoch's start and the number of batches taken since are the whole position.

    A graph is one batch, unless the model can be asked for some of its nodes (`by_nodes`): then a
    batch is `batch_size` training nodes.
    """

    def __init__(
        self,
        dataset: Any,
        config: TrainConfig,
        device: torch.device,
        *,
        augment: bool,
        by_nodes: bool = False,
    ) -> None:
        self._generator = torch.Generator().manual_seed(config.seed)
        self._source = _source(
            dataset, "train", config, device, by_nodes=by_nodes,
            generator=self._generator, augment=augment, drop_last=True,
        )  # fmt: skip
        self.terms = self._source.terms  # loss terms of a batch: B
        self._begin_epoch()

    def __len__(self) -> int:
        """Batches an epoch."""
        return self._source.count

    def _begin_epoch(self, taken: int = 0) -> None:
        self._start = self._generator.get_state()
        self._taken = taken
        self._iterator = self._source.starting_at(taken)

    def take(self) -> Batch:
        """The next batch; a new epoch begins where one ends."""
        if self._taken == len(self):
            self._begin_epoch()
        self._taken += 1
        return next(self._iterator)

    def shuffle(self, seed: int) -> None:
        """Begin a new epoch now, in an order that depends on the seed alone."""
        self._generator.manual_seed(seed)
        self._begin_epoch()

    def position(self) -> dict[str, Any]:
        """Where in the data the run is, for a checkpoint."""
        return {"generator": self._start, "taken": self._taken}

    def seek(self, position: dict[str, Any]) -> None:
        """Go to a position: the epoch's randomness is drawn again, its batches are not made."""
        self._generator.set_state(position["generator"])
        self._begin_epoch(position["taken"])


def in_order(
    dataset: Any, config: TrainConfig, device: torch.device, *,
    by_nodes: bool = False, part: str = "test",
) -> Source:  # fmt: skip
    """All examples of a part of the data, "test" or "train", in their order and unchanged.

    The batches are larger than in training, since nothing of them is kept for a backward pass.
    """
    config = replace(config, batch_size=_TEST_BATCHES * config.batch_size)
    return _source(
        dataset, part, config, device, by_nodes=by_nodes,
        generator=torch.Generator(), augment=False, drop_last=False, shuffle=False,
    )  # fmt: skip


def _source(
    dataset: Any,
    part: str,
    config: TrainConfig,
    device: torch.device,
    *,
    by_nodes: bool,
    **options: Any,
) -> Source:
    """The batches of a part of the data, "train" or "test"; a graph is on the device already."""
    always: tuple[Tensor, ...] = ()  # arguments of the model that all batches share
    split, size = getattr(dataset, part), config.batch_size
    if dataset.kind == "graph":
        graph = dataset.graph
        nodes = getattr(graph, part)
        nodes = nodes[graph.labels[nodes] >= 0]  # Citeseer has nodes without a label
        if not by_nodes:
            # One batch: all nodes go through the model, the chosen ones have targets.
            whole = Batch((graph.features, graph.edges), graph.labels[nodes], nodes)
            return Source(1, len(nodes), lambda first: iter([whole][first:]))
        split = data.Split(nodes, graph.labels[nodes])
        always = (graph.features, graph.edges)
        # The indices of nodes are examples, like the rows of a table.
        dataset, size = replace(dataset, kind="tabular"), min(size, len(nodes))
    if dataset.kind == "text" and config.context < 1:
        raise ConfigError("train.context must be at least 1 for text, got 0")
    batches = data.Batches(
        split, dataset, batch_size=size, device=device, context=config.context, **options
    )

    def starting_at(first: int) -> Iterator[Batch]:
        # Not a generator function, so that random numbers are drawn at once.
        rest = batches.starting_at(first)
        return (Batch((*always, x), y) for x, y in rest)

    return Source(len(batches), size * max(config.context, 1), starting_at)
