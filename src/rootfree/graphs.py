"""A step recorded once and replayed: for models whose steps are mostly launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rootfree.kernels.replay import no_collection
from rootfree.optimizer import RootFreeOptimizer

# Graphs kept; the one that was not used for longest leaves. Every kind of step needs one.
_MOST = 4
# Kinds of step that are remembered to have run once: a float lr that changes makes many.
_MOST_SEEN = 64


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    gradients: list[Tensor]  # where the recorded kernels read
    held: list[Any]  # tensors whose identity is part of the key


class GraphedStep:
    """Runs an optimizer's step from CUDA graphs: one launch in place of hundreds.

    Call :meth:`step` where you called ``optimizer.step()``. A kind of step (with or without a
    refresh of the preconditioner, with these hyper-parameters) runs as usual the first time, is
    recorded the second time, and replayed from then on, with the same result bit for bit. What a
    graph holds are numbers: give the optimizer a tensor as ``lr`` (``capturable=True`` makes one)
    if a scheduler changes it, or every change records anew.

    Gradients may move from step to step; those that did are copied to where the graph reads. To
    save that copy and its memory, use ``zero_grad(set_to_none=False)``. Hooks registered on the
    optimizer's step run only when it runs as usual.

    Args:
        optimizer: any optimizer of this library, all parameters on one CUDA device, with the
            default curvature.

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
        self._optimizer = optimizer
        self._device = next(iter(devices))
        self._seen: dict[Any, None] = {}  # in the order in which they came
        self._graphs: dict[Any, _Graph] = {}
        self._pool: Any = None

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        optimizer = self._optimizer
        # An unusable gradient is refused here, before anything is counted.
        ps = [p for _, ps, _ in optimizer._work() for p in ps]
        if optimizer._batch_counter is not None and ps:
            # Counted here: B is one of the numbers in the graph.
            optimizer._count_batch()
        counter, optimizer._batch_counter = optimizer._batch_counter, None
        try:
            key = (
                tuple(map(id, ps)),
                tuple(map(Tensor.data_ptr, ps)),
                *map(_numbers, optimizer.param_groups),
                self._kinds(),
                optimizer._epoch,
            )
            if key in self._graphs:
                self._replay(key, ps)
            elif key in self._seen:
                self._record(key, ps)
                self._replay(key, ps)
            else:
                optimizer.step()
                self._seen[key] = None
                if len(self._seen) > _MOST_SEEN:
                    del self._seen[next(iter(self._seen))]
        finally:
            if counter is not None:
                optimizer._batch_counter = counter
            else:
                del optimizer._batch_counter  # back to the class's None

    def _kinds(self) -> tuple[bool, ...]:
        return tuple(self._optimizer._refreshes(group) for group in self._optimizer.param_groups)

    def _record(self, key: Any, ps: list[Tensor]) -> None:
        if len(self._graphs) == _MOST:
            del self._graphs[next(iter(self._graphs))]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        steps = [group.get("step") for group in self._optimizer.param_groups]
        with (
            torch.cuda.device(self._device),
            no_collection(),
            torch.cuda.graph(graph, pool=self._pool),
        ):
            self._optimizer.step()
        for group, step in zip(self._optimizer.param_groups, steps, strict=True):
            if step is not None:
                group["step"] = step  # recording is not yet a step
        gradients = [p.grad for p in ps if p.grad is not None]
        held = [group["lr"] for group in self._optimizer.param_groups]
        self._graphs[key] = _Graph(graph, gradients, [*ps, *held])

    def _replay(self, key: Any, ps: list[Tensor]) -> None:
        recorded = self._graphs.pop(key)
        self._graphs[key] = recorded  # the last to leave
        pairs = [
            (there, p.grad)
            for there, p in zip(recorded.gradients, ps, strict=True)
            if p.grad is not None and p.grad.data_ptr() != there.data_ptr()
        ]
        if pairs:
            torch._foreach_copy_([there for there, _ in pairs], [here for _, here in pairs])
        recorded.graph.replay()
        self._optimizer._end_step()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at


def _numbers(group: dict[str, Any]) -> tuple[Any, ...]:
    """What a graph of this group's step has in it, less the step count."""
    return tuple(
        id(value) if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in ("params", "step", "param_names", "initial_lr")
    )
