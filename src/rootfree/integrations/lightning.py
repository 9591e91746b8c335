"""Lightning: the batch size, counted from the batches that the Trainer hands out."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from rootfree.placement.data_parallel import DataParallelSum
from rootfree.shell.batch_size import unwrapped
from rootfree.shell.checks import natural_number
from rootfree.shell.loss_terms import Count, counter_of, doubt_about_inputs, shifts_labels
from rootfree.shell.optimizer import RootFreeOptimizer

__all__ = ["BatchSizeCallback"]


class BatchSizeCallback(Callback):
    """Sets ``batch_size`` at every step from the batches that went into it.

    Batches add up over ``accumulate_grad_batches`` and over the ranks that average gradients. At
    the end of an epoch Lightning steps with fewer batches and still divides their losses by
    ``accumulate_grad_batches``; B is then what a full step would have.

    An optimizer without ``batch_size``, such as ``IFWhitening``, is left alone. With manual
    optimization only you know which batches go into a step: call
    ``rootfree.track_batch_size(self.network, optimizer)`` in ``configure_optimizers``.

    Args:
        count: what a loss term is, as in :func:`rootfree.track_batch_size`: None or "examples" (the
            length of the first tensor in the batch), "tokens", or a function of positional and
            keyword arguments, of which the batch is the first.
        process_group: the ranks that average gradients, as in :func:`rootfree.track_batch_size`.

    Example::

        Trainer(callbacks=[BatchSizeCallback()], accumulate_grad_batches=4)
    """

    def __init__(self, count: Count | str | None = None, *, process_group: Any = None) -> None:
        self._given, self._process_group = count, process_group
        self._tracked: RootFreeOptimizer | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tracked = None
        ours = [unwrapped(optimizer) for optimizer in trainer.optimizers]
        if not any("batch_size" in optimizer.options for optimizer in ours):
            return
        if not pl_module.automatic_optimization:
            raise RuntimeError(
                "BatchSizeCallback counts for automatic optimization. With manual optimization "
                "call rootfree.track_batch_size(self.network, optimizer) in configure_optimizers, "
                "or set optimizer.batch_size before each step"
            )
        if ours[0]._batch_counter is not None:
            raise RuntimeError(
                "track_batch_size counts for this optimizer already; use one of both"
            )
        shifting = next(filter(shifts_labels, pl_module.modules()), pl_module)
        self._count, self._guesses = counter_of(self._given, shifting)
        self._over_ranks = DataParallelSum(pl_module, self._process_group)
        self._tracked = ours[0]
        self._terms = self._total = self._batches = 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._tracked is None:
            return
        self._terms = natural_number("the count of loss terms", self._count((batch,), {}))
        reason = doubt_about_inputs((batch,), {}) if self._guesses else None
        if reason is not None:
            self._guesses = False
            warnings.warn(
                f"BatchSizeCallback counts {self._terms} loss terms, but {reason}; "
                "count='examples' says that this is right",
                stacklevel=2,
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        if self._tracked is not None:
            self._total += self._terms
            self._batches += 1

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if self._tracked is None:
            return
        total, batches = self._over_ranks(self._total), self._batches
        self._total = self._batches = 0
        if total > 0:
            # The losses were divided by this number, however many there were.
            divided_by = trainer.accumulate_grad_batches
            self._tracked.batch_size = round(total * divided_by / max(batches, 1))
