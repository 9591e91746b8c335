"""The mini-batch Fisher: gradients of the whole batch with targets drawn from the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rootfree.curvature import ParameterCurvature, SumOfOuterProducts
from rootfree.recorders.grams import wide_dtype
from rootfree.recorders.losses import LOSSES
from rootfree.recorders.recorder import Recorder
from rootfree.recorders.sampling import Draws
from rootfree.shell.checks import positive_integer


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
        scaler: the ``torch.amp.GradScaler`` in use (for the check of the loss's scale).
        seed: of the drawn targets; default: from torch's own, without drawing from it.
        process_group: ranks that average gradients; None: this process alone.

    The loss is given to :meth:`backward` with the model's outputs.

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

    _sums: dict[int, Tensor]

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
        super().__init__(model, loss=loss, scaler=scaler, process_group=process_group)
        self.samples = positive_integer("samples", samples)
        self._draws = Draws(seed, self._ranks)

    def _before_backward(self, loss: Tensor, outputs: Tensor | None) -> None:
        if outputs is None:
            raise ValueError("the model's outputs are needed: recorder.backward(loss, outputs)")
        assert self.loss is not None
        params = [p for p in self.model.parameters() if p.requires_grad]
        z = outputs.detach().to(torch.promote_types(outputs.dtype, torch.float32))
        for s in range(self.samples):
            v = LOSSES[self.loss].sample(z, self._draws.on(z.device)).to(outputs.dtype)
            grads = torch.autograd.grad(outputs, params, v, retain_graph=True, allow_unused=True)
            for p, g in zip(params, grads, strict=True):
                if g is not None:
                    self._rows_of(p)[s].add_(g)  # micro-batches: independent terms of one sum

    def _rows_of(self, p: Tensor) -> Tensor:
        if id(p) not in self._sums:
            shape, dtype = (self.samples, *p.shape), wide_dtype(p.dtype)
            self._sums[id(p)] = torch.zeros(shape, dtype=dtype, device=p.device)
        return self._sums[id(p)]

    def of(self, p: Tensor, *, batch_size: int) -> ParameterCurvature | None:
        """Vₛ = gₛ/√(S B)."""
        V = self._sums.get(id(p))
        if V is None:
            return None
        self._check_batch_size(batch_size)
        return SumOfOuterProducts(V / (self.samples * batch_size) ** 0.5)

    def _recorded(self) -> bool:
        return bool(self._sums)

    def _backward_hint(self) -> str:
        return ", with recorder.backward(loss, outputs)"

    def _reduce(self) -> None:
        if self._size > 1:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            self._ranks.sum_([self._rows_of(p) for p in trained])

    def _drop(self) -> None:
        super()._drop()
        self._sums = {}

    def _describe(self, p: nn.Parameter) -> str:
        return f"{self.samples} sampled gradients"
