"""The mini-batch Fisher: gradients of the whole batch with targets drawn from the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rootfree.curvature import ParameterCurvature, SumOfOuterProducts
from rootfree.recorders.recorder import Recorder


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
        seed: of the drawn targets; default: derived from torch's seed, without advancing its
            generator.
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
        super().__init__(
            model, loss=loss, samples=samples, scaler=scaler, seed=seed, process_group=process_group
        )
        self._rows = (self.samples,)

    def _before_backward(self, loss: Tensor, outputs: Tensor | None) -> None:
        if outputs is None:
            raise ValueError("the model's outputs are needed: recorder.backward(loss, outputs)")
        params = [p for p in self.model.parameters() if p.requires_grad]
        for s, gradients in enumerate(self._drawn(outputs, params)):
            for p, g in zip(params, gradients, strict=True):
                if g is not None:
                    self._sum_of(p)[s].add_(g)  # micro-batches: independent terms of one sum

    def of(self, p: Tensor, *, batch_size: int) -> ParameterCurvature | None:
        """Vₛ = gₛ/√(S B)."""
        V = self._records.get(id(p))
        if V is None:
            return None
        self._check_batch_size(batch_size)
        return SumOfOuterProducts(V / (self.samples * batch_size) ** 0.5)

    def _describe(self, p: nn.Parameter) -> str:
        return f"{self.samples} sampled gradients"
