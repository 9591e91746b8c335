"""Backward passes with random vectors: probes of the Hessian, targets drawn from the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rootfree.curvature import DiagonalCurvature, ParameterCurvature, SumOfOuterProducts
from rootfree.recorders.recorder import Recorder
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

    The other arguments are those of :class:`rootfree.KFACRecorder`; ``seed`` is that of the probes.

    ``backward(loss)`` replaces ``loss.backward()`` and makes, in addition, one backward pass that
    keeps its graph and one pass over that graph for each probe. Everything in the model must be
    twice differentiable. Fused attention kernels and reentrant checkpointing are not;
    ``torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`` is.

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

    _hint = ", with recorder.backward(loss)"

    def __init__(
        self,
        model: nn.Module,
        *,
        samples: int = 1,
        scaler: Any = None,
        seed: int | None = None,
        process_group: Any = "world",
    ) -> None:
        super().__init__(model, scaler=scaler, seed=seed, process_group=process_group)
        self.samples = positive_integer("samples", samples)
        if self._sharded:
            raise ValueError(
                "model must have whole parameters: HutchinsonDiagonal differentiates twice, which "
                "FSDP2 does not support. Use DDP, or another recorder"
            )

    def _before_backward(self, loss: Tensor, outputs: Tensor | None) -> None:
        params = [p for p in self._names if p.requires_grad]
        gradients = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        # A parameter that the gradient does not depend on has no curvature of its own.
        pairs = [(p, g) for p, g in zip(params, gradients, strict=True) if g is not None]
        curved = [(p, g) for p, g in pairs if g.requires_grad]
        if not curved:
            for p, _ in pairs:
                self._sum_of(p)
            return
        ps, gs = zip(*curved, strict=True)
        scale = self._scale_of(loss)
        for _ in range(self.samples):
            vs = [self._signs(p) for p in ps]
            products = torch.autograd.grad(gs, ps, vs, retain_graph=True, allow_unused=True)
            for p, v, Hv in zip(ps, vs, products, strict=True):
                total = self._sum_of(p)
                if Hv is not None:
                    total.add_(v * Hv.detach() / (self.samples * scale))

    def _signs(self, p: Tensor) -> Tensor:
        v = torch.empty(p.shape, dtype=p.dtype, device=p.device)
        return v.bernoulli_(0.5, generator=self._generator(p.device)).mul_(2).sub_(1)

    def of(self, p: Tensor, *, batch_size: int) -> ParameterCurvature | None:
        """h of the differentiated loss; how many terms it averages is in it already."""
        h = self._records.get(p)
        # Gradients averaged over ranks are those of the average of the ranks' losses.
        return None if h is None else DiagonalCurvature(h / self._divisor)

    def _describe(self, p: Tensor) -> str:
        return "diagonal Hessian"


class MonteCarloFisherRecorder(Recorder):
    r"""The Fisher matrix of the model's distribution, sampled.

    .. code-block:: text

        H = 1/(S B) Σₛ gₛ gₛᵀ      gₛ: gradient of the *summed* loss with targets ŷ ~ model

    Each gₛ is one backward pass over the whole batch. The targets of different examples are drawn
    independently and their gradients have mean zero, so that H is unbiased for the Fisher matrix
    although it has S directions only. It works for every model: nothing is hooked.

    Args:
        model: its trained parameters are differentiated.
        loss: "cross_entropy", "mse" or "binary_cross_entropy".
        samples: S, backward passes a batch; S gradients are kept until the step.

    The other arguments are those of :class:`rootfree.KFACRecorder`. The loss is given to
    :meth:`backward` with the model's outputs.

    Example:
        >>> import torch, rootfree
        >>> from rootfree.recorders import MonteCarloFisherRecorder
        >>> model = torch.nn.Linear(4, 3)
        >>> recorder = MonteCarloFisherRecorder(model, loss="cross_entropy", samples=2)
        >>> with recorder:
        ...     outputs = model(torch.randn(8, 4))
        ...     loss = torch.nn.functional.cross_entropy(outputs, torch.randint(3, (8,)))
        ...     recorder.backward(loss, outputs)
        >>> recorder.of(model.weight, batch_size=8).V.shape
        torch.Size([2, 3, 4])
    """

    _hint = ", with recorder.backward(loss, outputs)"

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: str,
        samples: int = 1,
        scaler: Any = None,
        seed: int | None = None,
        process_group: Any = "world",
    ) -> None:
        super().__init__(model, loss=loss, scaler=scaler, seed=seed, process_group=process_group)
        self.samples = positive_integer("samples", samples)
        self._rows = (self.samples,)

    def _before_backward(self, loss: Tensor, outputs: Tensor | None) -> None:
        if outputs is None:
            raise ValueError("the model's outputs are needed: recorder.backward(loss, outputs)")
        params = [p for p in self._names if p.requires_grad]
        for s, gradients in enumerate(self._drawn(outputs, self._leaves(params))):
            for p, g in zip(params, gradients, strict=True):
                if g is not None:
                    self._sum_of(p)[s].add_(g)  # micro-batches: independent terms of one sum

    def of(self, p: Tensor, *, batch_size: int) -> ParameterCurvature | None:
        """Vₛ = gₛ/√(S B)."""
        V = self._records.get(p)
        if V is None:
            return None
        self._check_terms(batch_size)
        return SumOfOuterProducts(V / (self.samples * batch_size) ** 0.5)

    def _describe(self, p: Tensor) -> str:
        return f"{self.samples} sampled gradients"
