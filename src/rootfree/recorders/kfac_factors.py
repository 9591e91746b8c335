"""The two factors of KFAC for one call of a layer: sums over inputs, and over output gradients.

Shapes as in `layers`. Weight sharing (Eschenhagen et al., 2023): "expand" takes every position for
an example of its own; "reduce" averages the inputs and sums the gradients over the positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from rootfree.curvature.kronecker import FactorStack, KroneckerStack
from rootfree.recorders.grams import gram_of_rows, grams_of_groups
from rootfree.recorders.layers import EmbeddingLayer, Layer, LinearLayer, MatrixLayer
from rootfree.structures.base import per_block, sum_of_squares, wide_dtype

Sharing = Literal["expand", "reduce"]
#: H of weights and of lone biases of layers that are alike, and which of the layers it is
OfLayer: TypeAlias = tuple[KroneckerStack, KroneckerStack, int]


@dataclass
class InputSums:
    """Σ a aᵀ (i, i), or its diagonal (i,); Σ a (i,); and the number of rows a."""

    A: Tensor
    a: Tensor
    rows: Tensor | float
    counted: Tensor | None = None  # (n, t), of one call: rows that are no padding; None: all

    def add_(self, other: InputSums) -> None:
        self.A += other.A
        self.a += other.a
        self.rows = self.rows + other.rows


@dataclass
class LayerSums:
    """What was recorded of a layer: its inputs, and Σ g gᵀ (g, o, o), or its diagonal (g, o)."""

    inputs: InputSums
    G: Tensor

    @classmethod
    def zeros(cls, layer: Layer, device: torch.device, max_dense: int) -> LayerSums:
        """The sums of a layer that was not called."""
        wide = wide_dtype(layer.weight.dtype)
        dense_in = layer.i <= max_dense and not layer.indexed
        A = torch.zeros([layer.i] * (1 + dense_in), dtype=wide, device=device)
        a = A.new_zeros(0 if layer.indexed else layer.i)
        G = A.new_zeros([layer.groups] + [layer.o] * (1 + (layer.o <= max_dense)))
        return cls(InputSums(A, a, 0), G)


@dataclass
class Call:
    """One forward pass of a layer, until its gradient comes by."""

    layer: Layer
    inputs: InputSums
    edge: GradientEdge | None = None
    added: bool = False  # several backward passes may see the same inputs


def input_sums(
    layer: Layer, x: Tensor, dtype: torch.dtype, sharing: Sharing, max_dense: int
) -> InputSums:
    """The input half of one call; rows are multiplied in `dtype`."""
    if isinstance(layer, EmbeddingLayer):
        return _index_sums(layer, x, sharing)
    x = x.to(dtype)
    dense = layer.i <= max_dense
    if dense and sharing == "expand" and isinstance(layer, LinearLayer):
        # What follows in fewer calls: a model has many of these, and the host is soon the slower.
        X = x.reshape(-1, x.shape[-1])
        return InputSums(gram_of_rows(X), X.sum(0, dtype=wide_dtype(dtype)), len(X))
    assert isinstance(layer, MatrixLayer)
    sums = None
    for piece in [layer.mean_inputs(x)] if sharing == "reduce" else layer.inputs(x):
        X = piece.reshape(-1, layer.i)  # channel groups are more rows of the same factor
        A = gram_of_rows(X) if dense else sum_of_squares(X, dim=0)
        new = InputSums(A, X.sum(0, dtype=wide_dtype(X.dtype)), len(X))
        if sums is None:
            sums = new
        else:
            sums.add_(new)
    return sums or LayerSums.zeros(layer, x.device, max_dense).inputs  # an empty batch


def gradient_sum(call: Call, grad: Tensor, sharing: Sharing, max_dense: int) -> Tensor:
    """Σ g gᵀ over the rows of output gradients (g, o, o), or its diagonal (g, o)."""
    layer, counted = call.layer, call.inputs.counted
    dense = layer.o <= max_dense
    if dense and sharing == "expand" and isinstance(layer, LinearLayer):
        return gram_of_rows(grad.reshape(-1, grad.shape[-1])).unsqueeze(0)
    Y = layer.outputs(grad)
    if counted is not None:
        Y = Y * counted[:, :, None, None]
    if sharing == "reduce":
        Y = Y.sum(1, keepdim=True, dtype=wide_dtype(grad.dtype))
    Y = Y.reshape(-1, layer.groups, layer.o)
    return grams_of_groups(Y) if dense else sum_of_squares(Y, dim=0)


def _index_sums(layer: EmbeddingLayer, x: Tensor, sharing: Sharing) -> InputSums:
    """One-hot inputs: Σ a aᵀ is diagonal ("reduce": its diagonal is taken)."""
    index = layer.indices(x)
    counted = layer.counted(x)
    wide = wide_dtype(layer.weight.dtype)
    # The sums count with the layer's own dtype: float32 is exact up to 2²⁴ of one index.
    weight = torch.ones_like(index, dtype=wide)
    n, t = index.shape
    rows: Tensor | float = n * t
    if counted is not None:  # padding has no gradient: it is no row
        weight = weight * counted
        rows = weight.sum()
    if sharing == "reduce":
        # a is the mean of the one-hot rows: a_v = (how often v occurs)/t, and Σ_v a_v² e_v sums
        # (how often the index at a position occurs)/t² over the positions.
        ordered = index.sort(dim=1).values
        occurs = torch.searchsorted(ordered, index, right=True) - torch.searchsorted(ordered, index)
        weight = weight * occurs / t**2
        rows = n
    A = torch.zeros(layer.i, dtype=wide, device=x.device)
    A.scatter_add_(0, index.reshape(-1), weight.reshape(-1))
    return InputSums(A, A.new_zeros(0), rows, counted)


def of_layers(
    recorded: Mapping[Tensor, tuple[LayerSums, Layer, bool]], *, factor: float
) -> dict[Tensor, OfLayer]:
    """G ⊗ A and G of every layer, by its weight: G = factor·Σ g gᵀ, A = E[a aᵀ].

    `recorded`: the sums of a layer, and whether its inputs have a one appended, that of the bias.
    """
    alike: dict[Any, list[Tensor]] = {}
    for weight, (sums, layer, bias) in recorded.items():
        rows = None if isinstance(sums.inputs.rows, Tensor) else sums.inputs.rows
        A, G = sums.inputs.A, sums.G
        form = (A.shape, A.dtype, A.device, G.shape, G.dtype, G.device, rows, layer.indexed, bias)
        alike.setdefault(form, []).append(weight)
    made: dict[Tensor, OfLayer] = {}
    for (*_, indexed, bias), members in alike.items():
        many = [recorded[weight][0] for weight in members]
        left = FactorStack(_as_matrices(torch.stack([sums.G for sums in many])).mul_(factor))
        right = FactorStack(_mean_inputs([sums.inputs for sums in many], bias=bias))
        both = (right, left) if indexed else (left, right)
        weights, biases = KroneckerStack(both), KroneckerStack((left,))
        made |= {weight: (weights, biases, row) for row, weight in enumerate(members)}
    return made


def _as_matrices(G: Tensor) -> Tensor:
    """(b, g, o, o) with the groups' blocks on the diagonal; diagonals (b, g, o) as one each."""
    b, g, o = G.shape[:3]
    if G.dim() == 3 or o == 1:
        return G.reshape(b, g * o)
    if g == 1:
        return G.squeeze(1)
    blocks = G.new_zeros(b, g, o, g, o)
    blocks.diagonal(dim1=1, dim2=3).copy_(G.permute(0, 2, 3, 1))
    return blocks.view(b, g * o, g * o)


def _mean_inputs(many: Sequence[InputSums], *, bias: bool) -> Tensor:
    """E[a aᵀ] (b, i, i), or diagonals (b, i), of layers alike in form and, if known, rows.

    With `bias`, of the inputs with a one appended, the input of the bias.
    """
    rows: Any = many[0].rows
    # A layer that got empty batches only has H = 0, not 0/0.
    if isinstance(rows, Tensor):
        rows = torch.stack([sums.rows for sums in many]).clamp(min=1)  # type: ignore[misc]
    else:
        rows = max(rows, 1)
    A = torch.stack([sums.A for sums in many])
    of_matrix = per_block(rows, A) if isinstance(rows, Tensor) else rows
    if not bias:
        return A.div_(of_matrix)
    i = A.shape[1]
    joined = A.new_ones([len(A)] + [i + 1] * (A.dim() - 1))
    if A.dim() == 2:
        torch.div(A, of_matrix, out=joined[:, :i])
        return joined
    torch.div(A, of_matrix, out=joined[:, :i, :i])
    last = joined[:, i, :i]
    a = torch.stack([sums.a for sums in many])
    torch.div(a, rows.unsqueeze(1) if isinstance(rows, Tensor) else rows, out=last)
    joined[:, :i, i] = last
    return joined
