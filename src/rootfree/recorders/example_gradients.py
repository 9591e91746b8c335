"""Per-example gradients of one module's parameters, from its input and its output's gradient.

Shapes as in `layers`: n examples come first. V (n, *shape of the parameter) is the gradient of the
loss by the parameter as far as it comes through each example's output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from rootfree.recorders.layers import EmbeddingLayer, Layer, MatrixLayer
from rootfree.structures.base import wide_dtype


def of_layer(layer: Layer, name: str, x: Tensor, grad: Tensor) -> Tensor:
    """V of the weight or the bias of a linear layer."""
    Y = _output_gradients(layer, x, grad)
    if name == "bias":
        return Y.sum(1).flatten(1)  # Σ_t y
    if isinstance(layer, EmbeddingLayer):
        index = layer.indices(x)[:, :, None].expand(-1, -1, layer.o)
        V = Y.new_zeros(len(Y), layer.i, layer.o)
        return V.scatter_add_(1, index, Y.squeeze(2))
    none = Y.new_zeros(0, layer.groups, layer.o, layer.i)  # of a batch without examples
    parts = [torch.einsum("ntgo,ntgi->ngoi", y, a) for y, a in _pieces(layer, x, Y)]  # Σ_t y aᵀ
    return torch.cat([none, *parts]).reshape(len(Y), *layer.weight.shape)


def total_of_layer(layer: Layer, x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the weight as far as it comes through one call: the sum of `of_layer`."""
    Y = _output_gradients(layer, x, grad)
    if isinstance(layer, EmbeddingLayer):
        total = Y.new_zeros(layer.i, layer.o)
        return total.index_add_(0, layer.indices(x).flatten(), Y.reshape(-1, layer.o))
    total = Y.new_zeros(layer.groups, layer.o, layer.i)
    for y, a in _pieces(layer, x, Y):
        total += torch.einsum("ntgo,ntgi->goi", y, a)
    return total.reshape(layer.weight.shape)


def _output_gradients(layer: Layer, x: Tensor, grad: Tensor) -> Tensor:
    """Gradients by the outputs, (n, t, g, o): zero where the input is padding."""
    Y = layer.outputs(grad).to(wide_dtype(layer.weight.dtype))
    counted = layer.counted(x) if isinstance(layer, EmbeddingLayer) else None
    return Y if counted is None else Y * counted[:, :, None, None]


def _pieces(layer: Layer, x: Tensor, Y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Output gradients Y (n, t, g, o) with the inputs (n, t, g, i), in pieces along n."""
    assert isinstance(layer, MatrixLayer)
    first = 0
    for a in layer.inputs(x):
        yield Y[first : first + len(a)], a.to(Y.dtype)
        first += len(a)


def of_batch_norm(module: _BatchNorm, name: str, x: Tensor, grad: Tensor) -> Tensor:
    """V of the scale or the shift; examples share the statistics, which are taken as given."""
    wide = wide_dtype(x.dtype)
    grad = grad.to(wide)
    if name == "weight":
        use_batch = module.training or module.running_mean is None
        mean, var = (None, None) if use_batch else (module.running_mean, module.running_var)
        grad = grad * batch_norm(x.to(wide), mean, var, training=use_batch, eps=module.eps)
    return grad.flatten(2).sum(2) if grad.dim() > 2 else grad


def of_module(
    module: nn.Module, name: str, x: Tensor, grad: Tensor, params: Mapping[str, Tensor]
) -> Tensor:
    """V of a parameter of any module that treats examples independently, by `torch.func`.

    `params`: those of the module that are not in it now.
    """
    p = params.get(name, module.get_parameter(name))
    bare = _WithoutHooks(module)
    others = {f"module.{key}": value for key, value in params.items()}

    def one(x: Tensor, grad: Tensor) -> Tensor:
        def forward(p: Tensor) -> Tensor:
            mine = {**others, f"module.{name}": p}
            y: Tensor = functional_call(bare, mine, (x.unsqueeze(0),))
            return y.squeeze(0)

        V: Tensor = vjp(forward, p.detach())[1](grad)[0]
        return V

    if len(x) == 0:
        return torch.zeros(0, *p.shape, dtype=wide_dtype(p.dtype), device=p.device)
    V: Tensor = vmap(one)(x.to(p.dtype), grad.to(p.dtype))
    return V.to(wide_dtype(V.dtype))


class _WithoutHooks(nn.Module):
    """Computes what the module does, unseen by the hooks on it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module.forward(x)
        return y
