"""Hugging Face's Trainer: the batch size that its loss means, and groups from the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

from rootfree.methods.if_whitening import IFWhitening
from rootfree.placement.data_parallel import data_parallel_ranks
from rootfree.placement.processes import initialised
from rootfree.shell.batch_size import BatchSizeTracker, track_batch_size, unwrapped
from rootfree.shell.loss_terms import Count, labels_in, shifts_labels, tokens
from rootfree.shell.optimizer import RootFreeOptimizer
from rootfree.shell.parameter_groups import parameter_groups

__all__ = ["BatchSizeCallback", "whole_model"]

#: those that callbacks made
_TRACKERS: WeakSet[BatchSizeTracker] = WeakSet()


class BatchSizeCallback(TrainerCallback):
    """Sets ``batch_size`` at every step to what the Trainer divides the loss by.

    The Trainer counts the labels of all micro-batches of a step, on all ranks, without those of
    -100, and divides by their number: that is B, and the model is told it. Where a model does not
    take it, B is the number of labels that are not -100, added over micro-batches and ranks.

    An optimizer without ``batch_size``, such as ``IFWhitening``, is left alone.

    Args:
        count: for losses of your own, a function of the positional and keyword arguments of the
            model's forward, which returns the number of loss terms of a micro-batch. Or "examples"
            or "tokens", as in :func:`rootfree.track_batch_size`.

    Example::

        Trainer(model, args, callbacks=[BatchSizeCallback()], ...)
    """

    def __init__(self, count: Count | str | None = None) -> None:
        self._count = count
        self._divisor: _Divisor | None = None
        self._tracker: BatchSizeTracker | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: Any, control: Any, **given: Any
    ) -> None:
        model, optimizer = given["model"], unwrapped(given["optimizer"])
        if "batch_size" not in optimizer.options:
            return
        if args.n_gpu > 1:
            raise RuntimeError(
                f"the Trainer would share each batch between {args.n_gpu} GPUs with "
                "nn.DataParallel, where batch_size cannot be counted: start it with torchrun"
            )
        if optimizer._batch_counter in _TRACKERS:  # of a training that was interrupted
            optimizer._batch_counter.remove()
        self._divisor = None
        if self._count is None:
            self._divisor = _Divisor(model, global_count=bool(args.average_tokens_across_devices))
        self._tracker = track_batch_size(model, optimizer, count=self._divisor or self._count)
        _TRACKERS.add(self._tracker)

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._tracker is not None:
            # The Trainer calls model.zero_grad(), which does not tell the optimizer that a step
            # skipped by a gradient scaler is over.
            self._tracker.reset()
        if self._divisor is not None:
            self._divisor.begin()

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._tracker is not None:
            self._tracker.remove()
        self._tracker = self._divisor = None


class _Divisor:
    """Counts what the Trainer divides by, micro-batch by micro-batch.

    `global_count`: the Trainer tells every rank the sum over all of them.
    """

    def __init__(self, model: nn.Module, *, global_count: bool) -> None:
        self._model, self._global = model, global_count
        self._shifts = shifts_labels(model)
        self._told = False

    def begin(self) -> None:
        """A step begins."""
        self._told = False

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        whole = kwargs.get("num_items_in_batch")
        if whole is not None:  # of all micro-batches: the first one counts for all
            terms = 0 if self._told else self._share(int(whole))
            self._told = True
            return terms
        if labels_in(args, kwargs) is None:
            raise ValueError(
                "no labels reach the model, which is not told num_items_in_batch either: give "
                "BatchSizeCallback a function as count"
            )
        return tokens(args, kwargs, shifts=self._shifts)

    def _share(self, whole: int) -> int:
        """What this rank contributes to a sum over ranks that is to give `whole`."""
        if not (self._global and initialised()):
            return whole
        ranks = data_parallel_ranks(self._model)
        where = ranks.index(torch.distributed.get_rank())
        return (whole + len(ranks) - 1 - where) // len(ranks)


def whole_model() -> Callable[..., RootFreeOptimizer]:
    """For ``optimizer_cls_and_kwargs``: one optimizer for the whole model.

    The Trainer by itself makes two groups, with and without weight decay. With this, the groups
    are those of :func:`rootfree.parameter_groups`: hidden matrices for the method, all others for
    AdamW. Options are ``method`` (default: ``IFWhitening``), those of the method, and
    ``companion_lr`` (default: 2e-3) and ``overrides`` of the groups.

    Example::

        kwargs = {"method": rootfree.IFShampoo, "lr": 1e-2, "companion_lr": 1e-3}
        Trainer(model, args, optimizer_cls_and_kwargs=(whole_model, kwargs), ...)
    """

    def make(
        model: nn.Module,
        *,
        method: type[RootFreeOptimizer] = IFWhitening,
        companion_lr: float | None = None,
        overrides: Mapping[Any, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> RootFreeOptimizer:
        groups = parameter_groups(model, companion_lr=companion_lr, overrides=overrides)
        make_method: Callable[..., RootFreeOptimizer] = method
        return make_method(groups, **options)

    return make
