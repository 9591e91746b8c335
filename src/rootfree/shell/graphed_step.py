"""Steps that are recorded once and replayed, for models whose steps are mostly launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rootfree.kernels.graphs import Recordings
from rootfree.shell import batch_size_option
from rootfree.shell.gradients import advance_clocks, find_work
from rootfree.shell.optimizer import RootFreeOptimizer
from rootfree.shell.work import Work


class _Held(NamedTuple):
    """Objects that must live as long as a recorded step."""

    gradients: list[Tensor]  # where the recorded kernels read
    objects: list[Any]  # their ids are part of the kind


class GraphedStep:
    """Runs an optimizer's step from CUDA graphs: one launch in place of hundreds.

    Call :meth:`step` where you called ``optimizer.step()``. A kind of step (with or without a
    refresh, say) runs as usual first, is then recorded, and replayed from then on, bit for bit.
    Where kernels run, hyper-parameters may change without a new recording. Without kernels, and in
    groups with a companion, they are part of the graph: use ``capturable=True`` if a scheduler
    changes ``lr``.

    Gradients may move from step to step; those that did are copied to where the graph reads. To
    save that copy and its memory, use ``zero_grad(set_to_none=False)``. Hooks registered on the
    optimizer's step run only when it runs as usual.

    Args:
        optimizer: one of this library's, on one CUDA device, with the default curvature.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = rootfree.IFShampoo(model.parameters(), batch_size=32)
        >>> if torch.cuda.is_available():
        ...     graphed = rootfree.GraphedStep(optimizer)
    """

    def __init__(self, optimizer: RootFreeOptimizer) -> None:
        if not isinstance(optimizer, RootFreeOptimizer):
            raise TypeError(f"optimizer must be one of rootfree's, got {type(optimizer).__name__}")
        devices = {p.device for group in optimizer.param_groups for p in group["params"]}
        if len(devices) != 1 or next(iter(devices)).type != "cuda":
            found = ", ".join(sorted(map(str, devices)))
            raise ValueError(f"all parameters of optimizer must be on one CUDA device, got {found}")
        if optimizer._curvature is not None:
            raise ValueError(
                "optimizer must have the default curvature: a recorder's part of a step cannot be "
                "recorded in a graph"
            )
        if optimizer._watch.mode == "raise":
            raise ValueError(
                "nonfinite must be 'skip' or 'propagate' in a graph, got 'raise': the host would "
                "have to wait for the gradients"
            )
        if (reason := optimizer._why_not_recordable()) is not None:
            name = type(optimizer).__name__
            raise ValueError(f"a step of {name} cannot be recorded in a graph: {reason}")
        self._optimizer = optimizer
        self._device = next(iter(devices))
        self._recordings = Recordings(first=1, limited=False)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        optimizer = self._optimizer
        # Refuses an unusable gradient before anything is counted.
        work = find_work(optimizer)
        if optimizer._batch_counter is not None and work:
            # Counted outside of the graph: recorded kernels read B from memory.
            batch_size_option.count(optimizer)
        counter, optimizer._batch_counter = optimizer._batch_counter, None
        optimizer._replayed_here = True
        try:
            ps = [p for w in work for p in w.ps]
            gs = [g for w in work for g in w.gs]
            kind, objects = self._kind(work)
            known = self._recordings.held(kind)
            if known is not None:
                _copy_moved(gs, known.gradients)
            with torch.cuda.device(self._device):
                for w in work:
                    optimizer._send_numbers(w)
                optimizer._watch.kernel.stock_up()
                replayed = self._recordings(
                    kind, optimizer.step, held=_Held(gs, objects), record=self._record
                )
            if replayed:
                for w in work:
                    w.gs = []
                advance_clocks(optimizer, work)
                optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it
                torch.autograd.graph.increment_version(ps)
        finally:
            del optimizer._replayed_here
            if counter is not None:
                optimizer._batch_counter = counter
            else:
                del optimizer._batch_counter  # back to the class's None

    def release(self) -> None:
        """Drop the recorded graphs, as before a process group ends; steps are recorded anew."""
        self._recordings.release()
        self._optimizer.release()

    def _record(self) -> None:
        """The part of a step that is recorded: the updates, without the counting."""
        work = find_work(self._optimizer)
        self._optimizer._watch.look(work, self._optimizer.param_groups)
        for w in work:
            self._optimizer._act(w)

    def _kind(self, work: list[Work]) -> tuple[Any, list[Any]]:
        """What a recording depends on beside the contents of tensors, and the objects in that."""
        objects: list[Any] = []
        kind: list[Any] = []
        for w in work:
            lr = w.group["lr"]
            objects += [w, lr]
            kind += [id(w), w.refresh, *map(Tensor.data_ptr, w.ps)]
            for name, value in _in_graph(self._optimizer, w).items():
                kind.append((name, id(value) if isinstance(value, Tensor) else value))
        return tuple(kind), objects


def _in_graph(optimizer: RootFreeOptimizer, work: Work) -> dict[str, Any]:
    """Options that a recording contains; of those that kernels read live, whether they are 0."""
    live = optimizer._reads_numbers(work)
    settings = optimizer._settings(work.group, work.where[0])
    return {
        name: value != 0 if live and isinstance(value, (int, float)) else value
        for name, value in settings.items()
        if name in optimizer._of(work.group).options or name not in work.group
    }


def _copy_moved(gs: list[Tensor], places: list[Tensor]) -> None:
    """Copy gradients that have moved to where the recorded kernels read them."""
    moved = [
        (place, g) for place, g in zip(places, gs, strict=True) if g.data_ptr() != place.data_ptr()
    ]
    if moved:
        torch._foreach_copy_([place for place, _ in moved], [g for _, g in moved])
