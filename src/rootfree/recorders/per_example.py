"""The standard empirical Fisher: one outer product for each example."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm

from rootfree.curvature import ParameterCurvature, SumOfOuterProducts
from rootfree.recorders import example_gradients
from rootfree.recorders.grams import without_autocast
from rootfree.recorders.hooked import HookedRecorder
from rootfree.recorders.layers import find_layers
from rootfree.recorders.soundness import NOT_WHOLE, this_backward
from rootfree.structures.base import wide_dtype


@dataclass
class _Call:
    """Input and output gradient of one call of a module."""

    backward: int  # which backward pass; calls of the same one are about the same examples
    x: Tensor
    version: int  # of x when it was recorded
    params: dict[str, Tensor]  # of a module that torch.func treats, where the model is sharded
    grad: Tensor


class PerExampleGradients(SumOfOuterProducts):
    """A sum of outer products whose V is computed on demand and not kept."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        object.__setattr__(self, "_compute", compute)
        object.__setattr__(self, "_alive", lambda: None)

    @property
    def V(self) -> Tensor:  # type: ignore[override]
        """(examples, *shape of the parameter)."""
        alive: Tensor | None = self._alive()  # type: ignore[attr-defined]
        if alive is None:
            alive = self._compute()  # type: ignore[attr-defined]
            object.__setattr__(self, "_alive", weakref.ref(alive))
        return alive


class PerExampleFisherRecorder(HookedRecorder):
    r"""The standard empirical Fisher, with the gradient of every example.

    .. code-block:: text

        H = (1/B) Σᵢ gᵢ gᵢᵀ      gᵢ: gradient of the loss of example i

    Against the default, B ḡḡᵀ with the gradient ḡ of the whole batch, H has up to B directions
    instead of one. Both have the same expectation when gradients of different examples are
    uncorrelated with mean zero; for one example they are the same.

    Args:
        model: linear layers, convolutions, embeddings and batch norms are recorded directly. Other
            modules are recorded with ``torch.func`` if they have parameters, one input tensor and
            one output tensor. All other parameters keep the gradient outer product: see
            :meth:`summary`.
        loss: as in :class:`KFACRecorder`, for the check that ``backward`` makes.

    ``scaler`` and ``process_group`` are those of :class:`rootfree.KFACRecorder`.

    The first axis of the model's input must count the examples. Where the loss has several terms
    for each (tokens), `batch_size` is the number of terms and gᵢ belongs to all terms of example i.

    The recorder keeps the inputs and output gradients of the modules until the step. This takes no
    more memory than the activations. The gradients of all examples, (examples, *shape) of one
    parameter, exist while the optimizer works on it. On several ranks each keeps its examples, and
    all gather them.

    Example:
        >>> import torch, rootfree
        >>> from rootfree.recorders import PerExampleFisherRecorder
        >>> model = torch.nn.Linear(4, 2)
        >>> recorder = PerExampleFisherRecorder(model)
        >>> with recorder:
        ...     model(torch.randn(8, 4)).square().sum(1).mean().backward()
        >>> recorder.of(model.weight, batch_size=8).V.shape
        torch.Size([8, 2, 4])
    """

    _records: dict[nn.Module, list[_Call]]
    _examples: int | None  # on all ranks; None: this process alone

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: str | None = None,
        scaler: Any = None,
        process_group: Any = "world",
    ) -> None:
        super().__init__(model, loss=loss, scaler=scaler, process_group=process_group)
        layers = find_layers(model).values()
        self._layers = {module: layer for layer in layers for module in layer.modules}
        self._owners: dict[Tensor, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                self._owners.setdefault(p, []).append((module, name))
        self._modules = list(dict.fromkeys(m for each in self._owners.values() for m, _ in each))
        self._tried: set[nn.Module] = set()

    def _hooked(self) -> Iterable[Tensor]:
        return [p for p in self._names if any(self._knows(m) for m, _ in self._owners[p])]

    def _hooks(self) -> list[Any]:
        hook = partial(self._after_forward, self._context)
        known = [module for module in self._modules if self._knows(module)]
        return [m.register_forward_hook(hook, prepend=True, with_kwargs=True) for m in known]

    @_disable_dynamo
    def _after_forward(
        self, context: object, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        trained = any(p.requires_grad for p in module.parameters(recurse=False))
        if not (torch.is_grad_enabled() and trained):
            return
        inputs = [*args, *kwargs.values()]
        fits = len(inputs) == 1 and isinstance(inputs[0], Tensor) and isinstance(output, Tensor)
        if not fits or (self._n is not None and self._n != len(inputs[0])):
            self._refused.add(module)  # no example axis, or not one tensor in and one out
            self._misfit = self._misfit or self._why_not(module, inputs)
            return
        if output.requires_grad:
            x = inputs[0].detach()
            ambiguous = output.dim() > 2 and output.shape[1] == len(output)
            if ambiguous and module not in self._examples_first:
                self._unclear.append((module, get_gradient_edge(output)))
            params = self._copies(module) if self._sharded else {}
            hook = partial(self._on_gradient, context, module, x, x._version, params)
            output.register_hook(hook)

    def _why_not(self, module: nn.Module, inputs: list[Any]) -> str:
        """Why a module is not recorded: the message where none is."""
        count = "examples" if self._n is None else f"{self._n} examples"
        shapes = [str(tuple(x.shape)) for x in inputs if isinstance(x, Tensor)]
        return (
            "PerExampleFisherRecorder could record no module: each must have one input tensor, "
            f"with the {count} of the model's input on its first axis, but {type(module).__name__} "
            f"got {', '.join(shapes) or 'no tensor'}. Where a model splits its batch, make a new "
            "recorder and give the model the parts one by one, inside one context"
        )

    @_disable_dynamo
    def _on_gradient(
        self, context: object, module: nn.Module, x: Tensor, version: int,
        params: dict[str, Tensor], grad: Tensor,
    ) -> None:  # fmt: skip
        if not self._counts(context):
            return
        grad = grad.detach()
        if self.scaler is not None:
            grad = grad / self._scale_of(grad)
        call = _Call(this_backward(), x, version, params, grad)
        if module not in self._tried and len(x) > 0 and not isinstance(module, _BatchNorm):
            # One example shows, once, whether `torch.func` can treat the module.
            self._tried.add(module)
            one = _Call(call.backward, x[:1], version, params, grad[:1])
            try:
                for name, _ in module.named_parameters(recurse=False):
                    self._of_call(module, name, one)
            except (RuntimeError, NotImplementedError, ValueError):
                self._refused.add(module)
        self._records.setdefault(module, []).append(call)

    def _copies(self, module: nn.Module) -> dict[str, Tensor]:
        """Parameters for torch.func of a sharded module: they are whole in its forward only."""
        if isinstance(module, _BatchNorm) or module in self._layers:
            return {}
        return {n: p.detach().clone() for n, p in module.named_parameters(recurse=False)}

    def _knows(self, module: nn.Module) -> bool:
        # Gradients divided by how often an index occurs are no sum over examples.
        if getattr(module, "scale_grad_by_freq", False):
            return False
        # What has recorded modules inside is not a function of its own parameters alone.
        return not any(p is not None for child in module.children() for p in child.parameters())

    def of(self, p: Tensor, *, batch_size: int) -> ParameterCurvature | None:
        """Vᵢ = √B times the gradient by `p` that comes through example i: H = Σ Vᵢ Vᵢᵀ."""
        owners = self._recorded(p)
        if not owners:
            return None
        self._check_terms(batch_size)
        examples = self._count() if self._examples is None else self._examples
        if batch_size != 1 and batch_size % examples:
            raise RuntimeError(
                f"the recorder saw {examples} examples, but batch_size is {batch_size}: it must be "
                "a multiple (the number of loss terms that are averaged), or 1 for a summed loss"
            )
        return PerExampleGradients(partial(self._gradients, owners, batch_size))

    def _recorded(self, p: Tensor) -> list[tuple[nn.Module, str]]:
        """The modules that have `p`, with its name there; none unless all of them were recorded."""
        owners = self._owners.get(p, [])
        usable = all(m in self._records and m not in self._refused for m, _ in owners)
        return owners if usable else []

    def _count(self) -> int:
        """How many examples this process saw."""
        return max(
            sum({call.backward: len(call.grad) for call in calls}.values())
            for calls in self._records.values()
        )

    def _gradients(self, owners: list[tuple[nn.Module, str]], batch_size: int) -> Tensor:
        parts: dict[int, Tensor] = {}
        for module, name in owners:
            for call in self._records.get(module, []):
                if call.x._version != call.version:
                    raise RuntimeError(
                        f"the input of a {type(module).__name__} was changed in place between "
                        "backward and step, where PerExampleFisherRecorder needs it"
                    )
                V = self._of_call(module, name, call)
                parts[call.backward] = parts[call.backward] + V if call.backward in parts else V
        module, name = owners[0]
        p = module.get_parameter(name)
        none = torch.zeros(0, *p.shape, dtype=wide_dtype(p.dtype), device=p.device)
        # Rows are of the differentiated loss, an average over all ranks: B Σ g gᵀ.
        V = torch.cat([none, *parts.values()]) * (batch_size**0.5 / self._divisor)
        return self._ranks.gather(V)

    def _of_call(self, module: nn.Module, name: str, call: _Call) -> Tensor:
        with torch.no_grad(), without_autocast(call.x.device.type):
            layer = self._layers.get(module)
            if layer is not None:
                return example_gradients.of_layer(layer, name, call.x, call.grad)
            if isinstance(module, _BatchNorm):
                return example_gradients.of_batch_norm(module, name, call.x, call.grad)
            return example_gradients.of_module(module, name, call.x, call.grad, call.params)

    def _verify(self) -> None:
        for p in self._names:
            owners = self._recorded(p)
            if not owners or not self._whole.waits_for(p):
                continue
            calls = [call for m, _ in owners for call in self._records[m]]
            passes = {call.backward for call in calls}
            size = sum(call.grad.norm() for call in calls)
            if self._whole.contradicts(p, passes, partial(self._total, owners), size):
                self._refused |= {module for module, _ in owners}
                self._warn(p, NOT_WHOLE)

    def _total(self, owners: list[tuple[nn.Module, str]], backward: int) -> Tensor:
        """Σᵢ gᵢ of one backward pass of this process."""
        calls = [(m, name, call) for m, name in owners for call in self._records[m]]
        mine = [(m, name, call) for m, name, call in calls if call.backward == backward]
        return torch.stack([self._of_call(m, name, call).sum(0) for m, name, call in mine]).sum(0)

    def _reduce(self) -> None:
        """Let ranks agree on what there is; `of` gathers the examples themselves."""
        seen, self._refused = self._ranks.unions(self._modules, self._records, self._refused)
        for module in seen:  # a rank that did not call the module takes part with no examples
            self._records.setdefault(module, [])
        (self._examples,) = self._ranks.sums([self._count()])

    def _drop(self) -> None:
        super()._drop()
        self._examples = None

    def _describe(self, p: Tensor) -> str:
        owners = [module for module, _ in self._owners[p]]
        if all(self._knows(m) and m not in self._refused for m in owners):
            return "per-example gradients"
        return f"gradient outer product (no per-example gradients of {type(owners[0]).__name__})"
