"""The diagonal of the Hessian by random probes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rootfree.curvature import DiagonalCurvature, ParameterCurvature
from rootfree.recorders.grams import wide_dtype
from rootfree.recorders.recorder import Recorder
from rootfree.recorders.sampling import Draws
from rootfree.shell.checks import positive_integer


class HutchinsonDiagonal(Recorder):
    r"""Hutchinson's estimate of the diagonal of the loss's Hessian.

    .. code-block:: text

        h = (1/S) Σₛ vₛ ∘ (∇²L vₛ)      entries of vₛ are ±1 with equal probability

    With it :class:`rootfree.RFRMSprop` is a diagonal Newton method without root (entries may be
    negative; the optimizers use their absolute values).

    Args:
        model: its trained parameters are differentiated.
        samples: S, products with the Hessian a batch.
        scaler: the ``torch.amp.GradScaler`` in use, so that its factor is taken out again.
        seed: of the probes; default: from torch's own, without drawing from it.
        process_group: ranks that average gradients; None: this process alone.

    ``backward(loss)`` stands for ``loss.backward()`` and makes, in addition, one backward pass that
    keeps its graph and one pass over that graph for each probe. Everything in the model must be
    twice differentiable: fused attention kernels are not
    (``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` is), reentrant checkpointing neither.

    Example:
        >>> import torch, rootfree
        >>> from rootfree.recorders import HutchinsonDiagonal
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> recorder = HutchinsonDiagonal(model)
        >>> with recorder:
        ...     x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        ...     recorder.backward(model(x).square().sum())
        >>> recorder.of(model.weight, batch_size=1).h
        tensor([[2., 8.]])
    """

    _sums: dict[int, Tensor]

    def __init__(
        self,
        model: nn.Module,
        *,
        samples: int = 1,
        scaler: Any = None,
        seed: int | None = None,
        process_group: Any = "world",
    ) -> None:
        super().__init__(model, scaler=scaler, process_group=process_group)
        self.samples = positive_integer("samples", samples)
        self._draws = Draws(seed, self._ranks)

    def _before_backward(self, loss: Tensor, outputs: Tensor | None) -> None:
        params = [p for p in self.model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        # A parameter that the gradient does not depend on has no curvature of its own.
        pairs = [
            (p, g)
            for p, g in zip(params, gradients, strict=True)
            if g is not None and g.requires_grad
        ]
        if not pairs:
            for p, g in zip(params, gradients, strict=True):
                if g is not None:
                    self._sum_of(p)
            return
        ps, gs = zip(*pairs, strict=True)
        scale = self._scale_of(loss)
        for _ in range(self.samples):
            vs = [self._signs(p) for p in ps]
            products = torch.autograd.grad(gs, ps, vs, retain_graph=True, allow_unused=True)
            for p, v, Hv in zip(ps, vs, products, strict=True):
                if Hv is not None:
                    self._sum_of(p).add_(v * Hv.detach() / (self.samples * scale))
                else:
                    self._sum_of(p)

    def _signs(self, p: Tensor) -> Tensor:
        v = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        return v.bernoulli_(0.5, generator=self._draws.on(p.device)).mul_(2).sub_(1)

    def _sum_of(self, p: Tensor) -> Tensor:
        if id(p) not in self._sums:
            self._sums[id(p)] = torch.zeros(p.shape, dtype=wide_dtype(p.dtype), device=p.device)
        return self._sums[id(p)]

    def of(self, p: Tensor, *, batch_size: int) -> ParameterCurvature | None:
        """h of the differentiated loss; how many terms it averages is in it already."""
        h = self._sums.get(id(p))
        # Gradients averaged over ranks are those of the average of the ranks' losses.
        return None if h is None else DiagonalCurvature(h / self._size)

    def _recorded(self) -> bool:
        return bool(self._sums)

    def _backward_hint(self) -> str:
        return ", with recorder.backward(loss)"

    def _reduce(self) -> None:
        if self._size > 1:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self._ranks.sum_([self._sum_of(p) for p in trained])

    def _drop(self) -> None:
        super()._drop()
        self._sums = {}

    def _describe(self, p: nn.Parameter) -> str:
        return "diagonal Hessian"
