"""Layers that are linear in their weight, seen as matrices: y = W a at every shared position.

One vocabulary for all of them:

    n  examples (first axis of the layer's input)
    t  positions at which the weight is shared (tokens, pixels of a convolution's output)
    g  channel groups of a convolution (1 elsewhere)
    i  inputs of a group (channels x kernel area), o  outputs of a group

    inputs   a  (n, t, g, i)          outputs, and gradients by them  (n, t, g, o)

The weight's gradient is Σ_t grad[n, t, g, o] a[n, t, g, i], summed over examples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from rootfree.structures.base import wide_dtype

# What modules that share a weight must have in common, to be one layer.
_OPTIONS = ("stride", "padding", "dilation", "groups", "padding_mode", "padding_idx")


@dataclass
class Layer(ABC):
    """A weight, its bias, and the modules that apply them (several when the weight is tied)."""

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    modules: list[nn.Module] = field(default_factory=list)

    #: the input is a table index; its matrix would be one-hot and is never made
    indexed: ClassVar[bool] = False

    @property
    def module(self) -> Any:
        """One of the modules; the options that matter are the same for all of them."""
        return self.modules[0]

    @property
    def groups(self) -> int:
        return 1

    @property
    def o(self) -> int:
        """Outputs of a group."""
        return self.weight.shape[0] // self.groups

    @property
    def i(self) -> int:
        """Inputs of a group."""
        return math.prod(self.weight.shape[1:])

    def trains(self) -> bool:
        """Whether anything of the layer gets a gradient; a layer without inputs has no matrix."""
        bias = self.bias is not None and self.bias.requires_grad
        return self.weight.numel() > 0 and (self.weight.requires_grad or bias)

    def outputs(self, y: Tensor) -> Tensor:
        """Something shaped like the layer's output as (n, t, g, o)."""
        return _as_rows(y)


class MatrixLayer(Layer):
    """A layer whose inputs are made into a matrix."""

    @abstractmethod
    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """The input as (n, t, g, i), in pieces along n that are no larger than the input is."""

    @abstractmethod
    def mean_inputs(self, x: Tensor) -> Tensor:
        """The input averaged over the positions: (n, 1, g, i)."""


class LinearLayer(MatrixLayer):
    """y = W a + b on the last axis."""

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        yield _as_rows(x)

    def mean_inputs(self, x: Tensor) -> Tensor:
        return _as_rows(x).mean(1, keepdim=True, dtype=wide_dtype(x.dtype))


class EmbeddingLayer(Layer):
    """The rows of a table: linear in the one-hot input, so that i is the table's length."""

    indexed = True

    @property
    def i(self) -> int:
        return self.weight.shape[0]

    @property
    def o(self) -> int:
        return self.weight.shape[1]

    def indices(self, x: Tensor) -> Tensor:
        """The input as (n, t)."""
        return x.reshape(len(x) if x.dim() > 0 else 1, math.prod(x.shape[1:]))

    def counted(self, x: Tensor) -> Tensor | None:
        """Which of the (n, t) indices have a gradient; None: all of them."""
        padding = self.module.padding_idx
        return None if padding is None else self.indices(x) != padding


class ConvLayer(MatrixLayer):
    """A convolution over one, two or three axes: linear in the patches of its input."""

    @property
    def groups(self) -> int:
        return int(self.module.groups)

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        patches = self._patches(x)
        n, g, _, *rest = patches.shape
        axes = len(rest) // 2
        # A patch matrix has the kernel's area times as many entries as the input.
        step = max(1, n * x.numel() // max(1, patches.numel()))
        for first in range(0, n, step):
            piece = patches[first : first + step]
            # (n, g, c, *positions, *kernel) -> (n, *positions, g, c, *kernel)
            order = (0, *range(3, 3 + axes), 1, 2, *range(3 + axes, 3 + 2 * axes))
            yield piece.permute(order).reshape(len(piece), -1, g, self.i)

    def mean_inputs(self, x: Tensor) -> Tensor:
        patches = self._patches(x)
        axes = (patches.dim() - 3) // 2
        mean = patches.mean(dim=tuple(range(3, 3 + axes)), dtype=wide_dtype(x.dtype))
        return mean.reshape(len(mean), 1, self.groups, self.i)

    def outputs(self, y: Tensor) -> Tensor:
        y = y if y.dim() == self.weight.dim() else y.unsqueeze(0)
        y = y.flatten(2).transpose(1, 2)
        return y.reshape(*y.shape[:2], self.groups, self.o)

    def _patches(self, x: Tensor) -> Tensor:
        """A view (n, g, c, *positions, *kernel) of the padded input."""
        module = self.module
        x = x if x.dim() == self.weight.dim() else x.unsqueeze(0)
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = pad(x, module._reversed_padding_repeated_twice, mode=mode)
        x = x.unflatten(1, (self.groups, -1))
        windows = zip(module.kernel_size, module.stride, module.dilation, strict=True)
        for axis, (k, s, d) in enumerate(windows, start=3):
            x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
        return x


def find_layers(model: nn.Module) -> dict[Tensor, Layer]:
    """The layers of `model` that these classes describe, by their weight.

    A weight that two modules use in different ways (an embedding tied to the output layer) has no
    single matrix and is left out. A bias that several weights have in common belongs to none.
    """
    layers: dict[Tensor, Layer] = {}
    refused: set[Tensor] = set()
    weights_of: dict[Any, set[Tensor]] = {}  # by bias
    for name, module in model.named_modules():
        kind = _kind(module)
        weight = getattr(module, "weight", None)
        if kind is None or not isinstance(weight, nn.Parameter):
            continue
        bias: nn.Parameter | None = getattr(module, "bias", None)
        layer = layers.setdefault(weight, kind(name, weight, bias))
        alike = all(
            getattr(module, option, None) == getattr(other, option, None)
            for other in layer.modules
            for option in _OPTIONS
        )
        if type(layer) is not kind or layer.bias is not bias or not alike:
            refused.add(weight)
        layer.modules.append(module)
        weights_of.setdefault(bias, set()).add(weight)
    for layer in layers.values():
        layer.bias = layer.bias if len(weights_of[layer.bias]) == 1 else None
    return {weight: layer for weight, layer in layers.items() if weight not in refused}


def _kind(module: nn.Module) -> type[Layer] | None:
    # A module that computes something else than its class says (its own forward, a weight made by
    # a parametrisation) is not described by the class; attention never calls its output layer.
    if isinstance(module, NonDynamicallyQuantizableLinear) or hasattr(module, "parametrizations"):
        return None
    forward = type(module).forward
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return LinearLayer
    if isinstance(module, nn.Embedding) and forward is nn.Embedding.forward:
        # Gradients divided by how often an index occurs are no sum over examples.
        return None if module.scale_grad_by_freq else EmbeddingLayer
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    if isinstance(module, convolutions) and any(forward is c.forward for c in convolutions):
        return ConvLayer
    return None


def _as_rows(x: Tensor) -> Tensor:
    """(n, ..., d) as (n, t, 1, d); an input of one example may lack the first axis."""
    n = x.shape[0] if x.dim() > 1 else 1
    return x.reshape(n, math.prod(x.shape[1:-1]), 1, x.shape[-1])  # n may be 0
