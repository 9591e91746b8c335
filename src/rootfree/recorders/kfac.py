"""KFAC: for every linear layer, H ≈ (gradient factor) ⊗ (input factor)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge

from rootfree.curvature import ParameterCurvature
from rootfree.recorders.example_gradients import total_of_layer
from rootfree.recorders.grams import row_dtype, without_autocast
from rootfree.recorders.hooked import HookedRecorder
from rootfree.recorders.kfac_factors import (
    Call,
    LayerSums,
    OfLayer,
    Sharing,
    gradient_sum,
    input_sums,
    of_layers,
)
from rootfree.recorders.layers import ConvLayer, Layer, find_layers
from rootfree.recorders.soundness import NOT_WHOLE, this_backward
from rootfree.shell.checks import positive_integer

Fisher = Literal["empirical", "type-2", "monte-carlo"]


class KFACRecorder(HookedRecorder):
    r"""KFAC: the curvature of each linear layer as a Kronecker product.

    .. code-block:: text

        H = G ⊗ A      A = E[a aᵀ] over the layer's inputs, with a one appended for the bias
                       G = B Σ g gᵀ over the gradients by its outputs        ("empirical")

    With it :class:`rootfree.IFShampoo` is inverse-free KFAC (SINGD).

    Args:
        model: its Linear, Conv1d, Conv2d, Conv3d and Embedding layers are recorded; parameters of
            other layers keep the gradient outer product, and :meth:`summary` says which.
        fisher: where the gradients g come from. "empirical": the loss itself, without an extra
            pass. "monte-carlo": the loss with targets drawn from the model's distribution, one
            backward pass (without weight gradients) for each of `samples`. "type-2": a root of the
            loss's Hessian, one such pass for each class or output: exact, and the most expensive.
        sharing: how a weight used at several positions (tokens, pixels) is treated. "expand": each
            position counts as a separate example; correct if each has its own loss term. "reduce":
            inputs are averaged, gradients summed over the positions; right where the loss sees
            their average, and cheaper.
        loss: "cross_entropy", "mse" or "binary_cross_entropy": needed by "monte-carlo" and
            "type-2", which are given the model's outputs with :meth:`backward`.
        samples: draws of the targets ("monte-carlo").
        joint: weight and bias of a layer are one matrix [W b]; else they are independent.
        max_dense: axes longer than this get a diagonal factor.
        scaler: the ``torch.amp.GradScaler`` in use, so that its factor is removed.
        seed: of the drawn targets; default: derived from torch's seed, without advancing its
            generator.
        process_group: ranks that average gradients; None: this process alone.

    A layer that is called several times in a forward pass contributes the rows of all calls, and
    micro-batches add up to the batch that they are, if their losses add up to its loss. Channel
    groups of a convolution are separate layers that share the average of their input factors.

    Example:
        >>> import torch, rootfree
        >>> from rootfree.recorders import KFACRecorder
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
        >>> recorder = KFACRecorder(model)
        >>> with recorder:
        ...     model(torch.randn(32, 4)).square().mean().backward()
        >>> H = recorder.of(model[0].weight, batch_size=32 * 8)
        >>> H.axes
        (8, 5)
    """

    _records: dict[Tensor, LayerSums]  # by the weight
    _calls: list[Call]  # of the forward passes whose loss has not been seen yet
    _made: dict[int, dict[Tensor, OfLayer]]  # by batch size and weight
    _pairs: dict[Tensor, Tensor]  # as the optimizer knows them, whatever is frozen later
    _through: dict[Tensor, dict[int, Tensor]]  # gradients seen in layers, by weight and pass

    def __init__(
        self,
        model: nn.Module,
        *,
        fisher: Fisher = "empirical",
        sharing: Sharing = "expand",
        loss: str | None = None,
        samples: int = 1,
        joint: bool = True,
        max_dense: int = 8192,
        scaler: Any = None,
        seed: int | None = None,
        process_group: Any = "world",
    ) -> None:
        if fisher not in ("empirical", "type-2", "monte-carlo"):
            raise ValueError(
                f'fisher must be "empirical", "type-2" or "monte-carlo", got {fisher!r}'
            )
        if sharing not in ("expand", "reduce"):
            raise ValueError(f'sharing must be "expand" or "reduce", got {sharing!r}')
        if fisher != "empirical" and loss is None:
            raise ValueError(f'fisher="{fisher}" needs to know the loss: give loss="cross_entropy"')
        super().__init__(model, loss=loss, scaler=scaler, seed=seed, process_group=process_group)
        self.samples = positive_integer("samples", samples)
        self._layers = find_layers(model)
        biases = {each.bias: each for each in self._layers.values() if each.bias is not None}
        self._owners = biases | self._layers
        self.fisher = fisher
        self.sharing = sharing
        self.max_dense = positive_integer("max_dense", max_dense)
        self._joint = joint
        self.joint()
        self._hint = "" if fisher == "empirical" else ", with recorder.backward(loss, outputs)"

    def _hooked(self) -> Iterable[Tensor]:
        return self._layers

    def _hooks(self) -> list[Any]:
        return [
            module.register_forward_hook(
                partial(self._after_forward, layer, self._context), prepend=True, with_kwargs=True
            )
            for layer in self._layers.values()
            for module in layer.modules
        ]

    @_disable_dynamo
    def _after_forward(
        self, layer: Layer, context: object, _: nn.Module, args: Any, kwargs: Any, output: Tensor
    ) -> None:
        if not (torch.is_grad_enabled() and output.requires_grad and layer.trains()):
            return
        x = args[0] if args else kwargs["input"]
        # The inputs are summed up now, not when the gradient comes: keeping them would undo
        # checkpointing, and autograd may hold only a half-precision copy. They count once the
        # gradient is seen: a checkpoint's recomputed forward pass never gets one.
        dtype = row_dtype(x)  # asked before autocast is off
        with without_autocast(x.device.type):
            call = Call(layer, input_sums(layer, x.detach(), dtype, self.sharing, self.max_dense))
        if self._whole.waits_for(layer.weight):
            output.register_hook(partial(self._on_whole, layer, x.detach(), context))
        if self.sharing == "reduce":
            self._look_at_examples(layer, x, output)
        if self.fisher == "empirical":
            output.register_hook(partial(self._on_gradient, call, context))
        else:
            call.edge = get_gradient_edge(output)
            self._calls.append(call)

    def _look_at_examples(self, layer: Layer, x: Tensor, output: Tensor) -> None:
        """Check that the positions, which are averaged, are not the examples."""
        shared = output.dim() > 2 and not isinstance(layer, ConvLayer)
        if not shared or layer.weight in self._examples_first or self._n is None:
            return
        if len(x) != self._n:
            self._refuse(layer.weight, f"its input {tuple(x.shape)} has no first axis of {self._n}")
        elif output.shape[1] == self._n:
            self._unclear.append((layer.weight, get_gradient_edge(output)))

    def _refuse(self, who: Tensor, reason: str) -> None:
        if who not in self._refused:
            super()._refuse(who, reason)
            self._warn(who, reason)

    @_disable_dynamo
    def _on_whole(self, layer: Layer, x: Tensor, context: object, grad: Tensor) -> None:
        """Add up the gradient of a weight as far as it comes through its layer."""
        if self._counts(context):
            with torch.no_grad(), without_autocast(grad.device.type):
                total = total_of_layer(layer, x, grad.detach()) / self._scale_of(grad)
            through = self._through.setdefault(layer.weight, {})
            number = this_backward()
            through[number] = through[number] + total if number in through else total

    def _verify(self) -> None:
        for weight, through in self._through.items():
            if self._whole.contradicts(weight, through, through.__getitem__):
                self._refuse(weight, NOT_WHOLE)
        self._through = {}

    @_disable_dynamo
    def _on_gradient(self, call: Call, context: object, grad: Tensor) -> None:
        if self._counts(context):
            self._add(call, grad, factor=self._scale_of(grad))

    def _add(self, call: Call, grad: Tensor, *, factor: Tensor | float = 1.0) -> None:
        with without_autocast(grad.device.type):
            G = gradient_sum(call, grad.detach(), self.sharing, self.max_dense)
            if not isinstance(factor, float):
                G /= factor**2
            sums = self._records.get(call.layer.weight)
            if sums is None:
                self._records[call.layer.weight] = LayerSums(call.inputs, G)
            else:
                sums.G += G
                if not call.added:
                    sums.inputs.add_(call.inputs)
            call.added, self._made = True, {}

    def _before_backward(self, loss: Tensor, outputs: Tensor | None) -> None:
        if self.fisher == "empirical":
            return
        if outputs is None:
            raise ValueError(
                f'fisher="{self.fisher}" needs the model\'s outputs: '
                "recorder.backward(loss, outputs)"
            )
        calls, self._calls = self._calls, []
        edges = [call.edge for call in calls]
        for grads in self._drawn(outputs, edges, exact=self.fisher == "type-2"):
            for call, grad in zip(calls, grads, strict=True):
                if grad is not None:
                    self._add(call, grad)

    def joint(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Weights and biases of the recorded layers, where both are trained when it is asked."""
        self._pairs = {
            weight: layer.bias
            for weight, layer in self._layers.items()
            if self._joint and layer.bias is not None
            if weight.requires_grad and layer.bias.requires_grad
        }
        self._made = {}
        return list(self._pairs.items())

    def of(self, p: Tensor, *, batch_size: int) -> ParameterCurvature | None:
        """G ⊗ A of the layer that `p` belongs to; of a lone bias, G."""
        layer = self._owners.get(p)
        weight = None if layer is None else layer.weight
        if weight is None or weight not in self._records or weight in self._refused:
            return None
        self._check_terms(batch_size)
        if batch_size not in self._made:
            # In the order of the layers, in which they will be stacked.
            recorded = {
                weight: (self._records[weight], layer, weight in self._pairs)
                for weight, layer in self._layers.items()
                if weight in self._records
            }
            self._made[batch_size] = of_layers(recorded, factor=self._factor(batch_size))
        weights, biases, row = self._made[batch_size][weight]
        return (weights if p is weight else biases).row(row)

    def _factor(self, batch_size: int) -> float:
        """The factor of Σ g gᵀ in G."""
        if self.fisher == "empirical":
            # Rows g are of the differentiated loss, an average: B Σ g gᵀ is (1/B) Σ (Bg)(Bg)ᵀ.
            # Gradients of ranks are summed and divided: a rank's g is that many times too large.
            return batch_size / self._divisor**2
        # Rows are of the summed loss, whose average the optimizer sees.
        return 1 / (batch_size * (self.samples if self.fisher == "monte-carlo" else 1))

    def _drop(self) -> None:
        super()._drop()
        self._calls, self._made, self._through = [], {}, {}

    def _reduce(self) -> None:
        self._made = {}
        device = next(iter(self._records.values())).G.device
        seen, self._refused = self._ranks.unions(self._layers, self._records, self._refused)
        for weight, layer in self._layers.items():
            if weight in seen:  # a rank that did not call the layer takes part with zeros
                empty = LayerSums.zeros(layer, device, self.max_dense)
                sums = self._records.setdefault(weight, empty)
                inputs = sums.inputs
                inputs.rows = torch.as_tensor(inputs.rows, dtype=inputs.A.dtype, device=device)
                self._ranks.sum_([inputs.A, inputs.a, inputs.rows, sums.G])

    def _describe(self, p: Tensor) -> str:
        layer = self._owners.get(p)
        if layer is None:
            return "gradient outer product (not a layer that KFAC knows)"
        if layer.weight in self._refused:
            return "gradient outer product (recordings would not be right)"
        joined = layer.weight in self._pairs
        if p is layer.bias:
            return "with its weight" if joined else f"KFAC {layer.groups * layer.o}"
        i = layer.i + joined
        sizes = (i, layer.o) if layer.indexed else (layer.groups * layer.o, i)
        return "KFAC " + " x ".join(map(str, sizes))
