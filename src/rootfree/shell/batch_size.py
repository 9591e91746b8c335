"""Counting the batch size from what goes through a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from rootfree.placement.data_parallel import DataParallelSum, Multiple, Total
from rootfree.shell.checks import natural_number, positive_integer
from rootfree.shell.optimizer import RootFreeOptimizer

Count = Callable[[tuple[Any, ...], dict[str, Any]], int]


def track_batch_size(
    model: nn.Module,
    optimizer: RootFreeOptimizer,
    count: Count | None = None,
    *,
    data_parallel_size: int | None = None,
    process_group: Any = None,
) -> BatchSizeTracker:
    """Set ``optimizer.batch_size`` at every step from what went through ``model``.

    Counted are forward passes in training mode whose result is differentiated; micro-batches add
    up until the step (or until ``optimizer.zero_grad()``, so that a step skipped by a gradient
    scaler is not counted into the next). The counts of the ranks that average gradients are added,
    so that all of them have one B whatever their batches; every rank must take part in every step,
    a rank without data too.

    Args:
        model: the module that is called; with DDP either the wrapper or what it wraps.
        optimizer: one of this library's optimizers.
        count: function of the forward's positional and keyword arguments that returns the number
            of loss terms; default: the length of the first tensor found in them, nested ones
            included. For a language model whose loss averages over tokens:
            ``count=lambda args, kwargs: args[0].numel()``.
        data_parallel_size: ranks that average gradients, where all have batches of one size: the
            count is multiplied by it, and nothing is communicated.
        process_group: the ranks that average gradients, a process group or a DeviceMesh. Default:
            the mesh that ``fully_shard`` was given, this rank alone where parameters are sharded
            over all ranks by tensor parallelism, and all ranks otherwise.

    Returns:
        A handle; ``handle.remove()``, or leaving it as a context, takes the hook off the model.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = rootfree.RFRMSprop(model.parameters())
        >>> handle = rootfree.track_batch_size(model, optimizer)
        >>> model(torch.randn(32, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> optimizer.batch_size
        32
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, RootFreeOptimizer):
        raise TypeError(
            f"optimizer must be one of rootfree's optimizers, got {type(optimizer).__name__}"
        )
    optimizer._check_batch_size_is_used()
    if optimizer._batch_counter is not None:
        raise ValueError("the batch size of this optimizer is tracked already; remove() it first")
    total: Total
    if data_parallel_size is not None:
        if process_group is not None:
            raise ValueError("give data_parallel_size or process_group, not both")
        total = Multiple(positive_integer("data_parallel_size", data_parallel_size))
    else:
        total = DataParallelSum(model, process_group)
    return BatchSizeTracker(model, optimizer, count or first_length, total)


class BatchSizeTracker:
    """The handle returned by :func:`track_batch_size`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: RootFreeOptimizer,
        count: Count,
        total: Total,
    ) -> None:
        self._count = count
        self._over_ranks = total
        self._total = 0
        self._optimizer: RootFreeOptimizer | None = optimizer
        self._hook = model.register_forward_hook(self._after_forward, with_kwargs=True)
        optimizer._batch_counter = self

    @_disable_dynamo
    def _after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._optimizer is None or not (module.training and torch.is_grad_enabled()):
            return
        terms = natural_number("the count of loss terms", self._count(args, kwargs))
        # Counted when the backward pass comes by, not now: zero_grad() may stand between forward
        # and backward, and a forward that is never differentiated contributes no gradient.
        waiting = [terms]

        def on_backward(_: Tensor) -> None:
            if waiting:  # several outputs, or several backward passes, are still one batch
                self._total += waiting.pop()

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(on_backward)

    def take(self, *, needed: bool = True) -> int:
        """The number of loss terms since the last step, over all ranks; starts anew.

        `needed`: whether there are gradients here, which makes a count of zero an error.
        """
        total = self._over_ranks(self._total)
        if total == 0 and needed:
            raise RuntimeError(
                "track_batch_size saw no backward pass through the tracked model in training mode "
                "since the last step; call model.train(), or set optimizer.batch_size yourself"
            )
        self.reset()
        return total

    def reset(self) -> None:
        """Forget what was counted since the last step."""
        self._total = 0

    def remove(self) -> None:
        """Take the hook off the model; the optimizer keeps the last batch size."""
        self._hook.remove()
        if self._optimizer is not None and self._optimizer._batch_counter is self:
            self._optimizer._batch_counter = None

    def __reduce__(self) -> tuple[Any, ...]:
        # The hook is copied and pickled along with the model (averaged copies, torch.save(model)).
        # That copy counts nothing, and does not take the optimizer and its state with it.
        return _detached_tracker, ()

    def __enter__(self) -> BatchSizeTracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def _detached_tracker() -> BatchSizeTracker:
    tracker = BatchSizeTracker.__new__(BatchSizeTracker)
    tracker._optimizer = None
    return tracker


def first_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The first axis of the first tensor in the arguments, positional ones first."""
    for tensor in _tensors((args, kwargs)):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise ValueError("no tensor with an axis in the model's inputs: give track_batch_size a count")


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _tensors(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from _tensors(getattr(tree, field.name))
