"""Counts the batch size from the inputs and gradients of a model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from functools import partial
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from rootfree.placement.data_parallel import DataParallelSum
from rootfree.shell.batch_size_option import check_is_used
from rootfree.shell.checks import natural_number, positive_integer
from rootfree.shell.loss_terms import (
    Count,
    Ids,
    class_axis,
    counter_of,
    doubt_about_inputs,
    doubt_about_loss,
    tensors_in,
)
from rootfree.shell.optimizer import RootFreeOptimizer

# Attributes in which wrappers keep the optimizer.
_INSIDE = ("optimizer", "_optimizer", "_base_optimizer")


def track_batch_size(
    model: nn.Module,
    optimizer: Any,
    count: Count | str | None = None,
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
        optimizer: one of this library's optimizers, or a wrapper that has it as its ``optimizer``
            (as Accelerate's).
        count: what a loss term is. "examples": the length of the first tensor found in the
            forward's arguments, nested ones included. "tokens": the labels that are not -100 if
            there is an argument ``labels``, without the first of each sequence for models that
            compare each token with the next (``...ForCausalLM``); else the positions of the first
            tensor of token ids at which the gradient of the output is not zero, which are those
            that the loss does not leave out. A function of the forward's positional and keyword
            arguments returns the number itself. None: "examples", with a warning where inputs or
            the gradient of the loss speak against it.
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
    optimizer = unwrapped(optimizer)
    check_is_used(optimizer)
    if optimizer._batch_counter is not None:
        raise ValueError("the batch size of this optimizer is tracked already; remove() it first")
    over_ranks: Callable[[int], int]
    if data_parallel_size is None:
        over_ranks = DataParallelSum(model, process_group)
    elif process_group is not None:
        raise ValueError("give data_parallel_size or process_group, not both")
    else:
        over_ranks = partial(mul, positive_integer("data_parallel_size", data_parallel_size))
    return BatchSizeTracker(model, optimizer, counter_of(count, model), over_ranks)


def unwrapped(optimizer: Any) -> RootFreeOptimizer:
    """The optimizer inside wrappers such as Accelerate's, Lightning's and timm's."""
    inner: Any = optimizer
    for _ in range(8):
        # Inside first: the class of Lightning's wrapper is derived from that of the optimizer.
        found = (getattr(inner, name, None) for name in _INSIDE)
        within = next((each for each in found if each is not None), None)
        if within is None:
            break
        inner = within
    if isinstance(inner, RootFreeOptimizer):
        return inner
    raise TypeError(
        f"optimizer must be one of rootfree's optimizers, got {type(optimizer).__name__}"
    )


class BatchSizeTracker:
    """The handle returned by :func:`track_batch_size`.

    The optimizer owns it: the tracker and its hook go when the optimizer does.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: RootFreeOptimizer,
        counter: tuple[Count, bool],
        over_ranks: Callable[[int], int],
    ) -> None:
        """`over_ranks`: the loss terms of a step, given those that were counted here."""
        self._count, self._guesses = counter
        self._over_ranks = over_ranks
        self._passes: list[_Pass] = []  # since the last step
        self._backward = -1  # the backward pass that was counted last
        self._looked = False  # whether the gradient of a loss was checked
        self._opaque = ""  # the type of an output in which no tensor was found
        self._name = type(model).__name__
        self._optimizer = weakref.ref(optimizer)
        hook = model.register_forward_hook(_Hook(self), with_kwargs=True)
        self._remove_hook = weakref.finalize(self, hook.remove)
        optimizer._batch_counter = self

    def _doubt(self, reason: str | None, counted: int) -> None:
        """Warn once that the count may be wrong."""
        if reason is not None and self._guesses:
            self._guesses = False
            warnings.warn(
                f"track_batch_size counts {counted} loss terms, but {reason}; count='examples' "
                "says that this is right",
                stacklevel=2,
            )

    def _miss(self, ids: Ids, shapes: list[tuple[int, ...]]) -> None:
        """Warn once that the output has no position for each token."""
        if not self._looked:
            self._looked = True
            warnings.warn(
                f"track_batch_size counts {ids} tokens of shape {tuple(ids.shape)}, but the "
                f"model's output has shape {', '.join(map(str, shapes))}: it does not tell which "
                "of them the loss leaves out. Give the model its labels, or give a function as "
                "count",
                stacklevel=2,
            )

    def after_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Count a forward pass once its backward pass runs."""
        if not (module.training and torch.is_grad_enabled()):
            return
        found = self._count(args, kwargs)
        terms = natural_number("the count of loss terms", found)
        if self._guesses:
            self._doubt(doubt_about_inputs(args, kwargs), terms)
        # Counted in the backward pass, not now: zero_grad() may come between the two, and a forward
        # pass that is never differentiated contributes no gradient.
        here = _Pass(terms)
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        self._opaque = "" if outputs else type(output).__name__
        axes: list[int | None] = [None] * len(outputs)
        if isinstance(found, Ids):
            axes = [class_axis(tensor.shape, found.shape) for tensor in outputs]
            if outputs and not any(axes):
                self._miss(found, [tuple(tensor.shape) for tensor in outputs])

        def on_backward(gradient: Tensor, axis: int | None) -> None:
            if axis is not None:
                # The gradient is zero at positions that the loss leaves out.
                here.use((gradient.detach() != 0).any(axis).flatten())
            # The first output to get a gradient was not an input of another output. A scalar is
            # the loss itself.
            if self._guesses and not self._looked and gradient.dim() > 0:
                # Only once, as the host waits for the device. A skipped batch tells nothing.
                self._looked = bool(gradient.isfinite().all())
                self._doubt(doubt_about_loss(gradient, terms) if self._looked else None, terms)
            if here.counted:  # several outputs, or several backward passes, of one batch
                return
            here.counted = True
            self._passes.append(here)
            backward, self._backward = self._backward, torch._C._current_graph_task_id()
            if self._guesses and backward == self._backward != -1:
                reason = "several forward passes went into one backward pass, and their counts add"
                self._doubt(reason, sum(map(int, self._passes)))

        for tensor, axis in zip(outputs, axes, strict=True):
            tensor.register_hook(partial(on_backward, axis=axis))

    def take(self, *, needed: bool = True) -> int:
        """The number of loss terms since the last step, over all ranks.  Resets the count.

        `needed`: whether this rank has gradients, which makes a count of zero an error.
        """
        total = self._over_ranks(sum(map(int, self._passes)))
        if total == 0 and needed and self._opaque:
            raise RuntimeError(
                f"track_batch_size found no tensor with a gradient in the output of {self._name}, "
                f"of type {self._opaque}. Return a tensor, or a tuple, dict or dataclass of "
                "tensors; or set optimizer.batch_size yourself"
            )
        if total == 0 and needed:
            raise RuntimeError(
                f"track_batch_size saw no backward pass through {self._name} in training mode "
                "since the last step. Call model.train(); track the module that is called (in a "
                "LightningModule whose training_step does not call self(...), the network that it "
                "calls); or set optimizer.batch_size yourself"
            )
        self.reset()
        return total

    def reset(self) -> None:
        """Forget what was counted since the last step."""
        self._passes = []

    def remove(self) -> None:
        """Take the hook off the model; the optimizer keeps the last batch size."""
        self._remove_hook()
        optimizer = self._optimizer()
        if optimizer is not None and optimizer._batch_counter is self:
            optimizer._batch_counter = None

    def __enter__(self) -> BatchSizeTracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Pass:
    """A forward pass and its number of loss terms, without positions that no loss uses."""

    def __init__(self, terms: int) -> None:
        self.counted = False
        self._terms = terms
        self._used: Tensor | None = None
        self._number: Tensor | None = None
        self._arrived: Any = None  # an event: the number is on the host

    def use(self, positions: Tensor) -> None:
        """Add positions that a loss depends on."""
        self._used = positions if self._used is None else self._used | positions
        number = self._number = self._used.sum()
        if number.is_cuda:
            # Copied now, so that reading it waits only for work that is queued so far.
            self._number = torch.empty((), dtype=number.dtype, device="cpu", pin_memory=True)
            self._number.copy_(number, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(number.device))

    def __int__(self) -> int:
        if self._arrived is not None:
            self._arrived.synchronize()
        # If all gradients are zero, the count does not matter.
        return self._terms if self._number is None else int(self._number) or self._terms


class _Hook:
    """A hook that holds its tracker weakly."""

    def __init__(self, tracker: BatchSizeTracker | None) -> None:
        self._tracker = (lambda: None) if tracker is None else weakref.ref(tracker)

    @_disable_dynamo
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        tracker = self._tracker()
        if tracker is not None:
            tracker.after_forward(module, args, kwargs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # The hook is copied and pickled with the model (averaged copies, torch.save(model)). The
        # copy counts nothing, and does not drag the optimizer and its state along.
        return _Hook, (None,)
