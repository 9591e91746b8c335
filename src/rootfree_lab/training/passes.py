"""Forward and backward pass of a training step, run normally or replayed from CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.training.feeding import Batch

# Normal steps before the passes are recorded, in which libraries initialise and gradients are made.
_FIRST = 3


#: A batch through the model and the loss: outputs and loss.
Forward = Callable[[Batch], tuple[Tensor, Tensor]]


class Passes:
    """The passes, run normally."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._loss: Tensor | None = None

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Outputs and loss of a batch, detached."""
        outputs, self._loss = self._forward(batch)
        return outputs.detach(), self._loss.detach()

    def backward(self) -> None:
        """Add the gradients of the last loss to the parameters."""
        assert self._loss is not None, "forward comes first"
        self._loss.backward()
        self._loss = None  # and what it was computed from


@dataclass
class _Recorded:
    batch: Batch  # where the graphs read
    outputs: Tensor
    loss: Tensor
    gradients: list[Tensor | None]
    graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]


class GraphedPasses(Passes):
    """The same kernels with one launch per pass, for models whose steps are mostly launches.

    All batches must have one shape, and gradients must be None when a step begins. The first steps
    run normally; the results are those of `Passes`, bit for bit.
    """

    def __init__(self, forward: Forward, model: nn.Module) -> None:
        super().__init__(forward)
        self._parameters = list(model.parameters())
        self._steps = 0
        self._recorded: _Recorded | None = None

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self._steps += 1
        if self._steps <= _FIRST:
            return super().forward(batch)
        if self._recorded is None:
            self._recorded = self._record(batch)
        here = self._recorded
        for there, given in zip(_tensors(here.batch), _tensors(batch), strict=True):
            there.copy_(given)
        here.graphs[0].replay()
        return here.outputs, here.loss

    def backward(self) -> None:
        if self._recorded is None:
            super().backward()
            return
        self._recorded.graphs[1].replay()
        for p, gradient in zip(self._parameters, self._recorded.gradients, strict=True):
            p.grad = gradient

    def _record(self, batch: Batch) -> _Recorded:
        """Record both passes; this runs nothing, so neither numbers nor statistics change."""
        fixed = Batch(tuple(x.clone() for x in batch.inputs), batch.target.clone())
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        gc.collect()  # destroys graphs of earlier runs, which would break the recording later
        try:
            with torch.cuda.graph(forward):
                outputs, loss = self._forward(fixed)
            with torch.cuda.graph(backward, pool=forward.pool()):
                loss.backward()
        except RuntimeError as error:
            raise ConfigError(
                f"train.graphs must be false for this model: it cannot be recorded ({error})"
            ) from error
        gradients = [p.grad for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        return _Recorded(fixed, outputs.detach(), loss.detach(), gradients, (forward, backward))


def _tensors(batch: Batch) -> list[Any]:
    return [*batch.inputs, batch.target]
