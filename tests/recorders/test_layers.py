"""Layers as matrices: a convolution is the linear layer of its unfolded input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recorders.networks import normal, relative, seeded
from rootfree.recorders import KFACRecorder, PerExampleFisherRecorder
from rootfree.recorders.layers import ConvLayer, find_layers

TOLERANCE = 1e-12
N = 3
FUNCTIONS = {
    nn.Conv1d: nn.functional.conv1d,
    nn.Conv2d: nn.functional.conv2d,
    nn.Conv3d: nn.functional.conv3d,
}


def unfolded(conv: Any, x: Tensor) -> Tensor:
    """(n, t, g, i): each entry of a patch is picked by a convolution with a one-hot kernel."""
    shape = conv.weight.shape[1:]
    i = shape.numel()
    eye = torch.eye(i, dtype=x.dtype).reshape(i, *shape)
    if conv.padding_mode != "zeros":
        x = nn.functional.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode)
    picked = [
        FUNCTIONS[type(conv)](
            part,
            eye,
            stride=conv.stride,
            dilation=conv.dilation,
            padding=conv.padding if conv.padding_mode == "zeros" else 0,
        )
        for part in x.chunk(conv.groups, dim=1)
    ]
    return torch.stack([p.flatten(2).transpose(1, 2) for p in picked], dim=2)


@st.composite
def convolutions(draw: Any) -> tuple[nn.Module, Tensor]:
    kind, axes = draw(st.sampled_from([(nn.Conv1d, 1), (nn.Conv2d, 2)]))
    several = lambda low, high: tuple(draw(st.integers(low, high)) for _ in range(axes))  # noqa: E731
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    strings = draw(st.sampled_from([None, None, "same", "valid"]))
    stride = (1,) * axes if strings == "same" else several(1, 3)
    conv = seeded(
        lambda: kind(
            groups * draw(st.integers(1, 2)),
            groups * draw(st.integers(1, 2)),
            several(1, 3),
            stride=stride,
            padding=strings or several(0, 2),
            dilation=several(1, 2),
            groups=groups,
            bias=draw(st.booleans()),
            padding_mode=draw(st.sampled_from(["zeros", "zeros", "circular", "reflect"])),
        )
    )
    sizes = tuple(draw(st.integers(5, 7)) for _ in range(axes))
    return conv, normal(N, conv.in_channels, *sizes)


# torch copies the input where "same" pads unevenly, and says so
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(max_examples=60)
@given(convolutions())
def test_convolution_is_the_linear_layer_of_its_patches(case: tuple[Any, Tensor]) -> None:
    conv, x = case
    layer = find_layers(conv)[conv.weight]
    a = unfolded(conv, x)  # (n, t, g, i)
    torch.testing.assert_close(torch.cat(list(layer.inputs(x))), a)
    torch.testing.assert_close(layer.mean_inputs(x), a.mean(1, keepdim=True))
    recorders = {s: KFACRecorder(conv, sharing=s) for s in ("expand", "reduce")}
    examples = PerExampleFisherRecorder(conv)
    weights = normal(*conv(x).shape, seed=3)  # any gradient by the outputs
    for recorder in (*recorders.values(), examples):
        with recorder:
            (conv(x) * weights).sum().backward()
    g = weights.flatten(2).transpose(1, 2).unflatten(2, (conv.groups, -1))
    if conv.bias is not None:
        a = torch.cat([a, torch.ones(*a.shape[:3], 1, dtype=a.dtype)], dim=3)
    # Σ over all rows; groups are separate layers with a common input factor.
    for sharing, (aa, gg) in {
        "expand": (a, g),
        "reduce": (a.mean(1, keepdim=True), g.sum(1, keepdim=True)),
    }.items():
        G, A = recorders[sharing].of(conv.weight, batch_size=1).factors
        rows = aa.flatten(0, 2)
        assert relative(A, rows.mT @ rows / len(rows)) < TOLERANCE
        blocks = torch.einsum("ntgo,ntgp->gop", gg, gg)
        assert relative(G if G.dim() == 2 else G.diag(), torch.block_diag(*blocks)) < TOLERANCE
    V = torch.einsum("ntgo,ntgi->ngoi", g, a)[..., : conv.weight[0].numel()]
    mine = examples.of(conv.weight, batch_size=1).V
    assert relative(mine, V.reshape(N, *conv.weight.shape)) < TOLERANCE


def test_three_axes_and_no_example_axis() -> None:
    conv = seeded(lambda: nn.Conv3d(2, 3, 2, padding=1))
    x = normal(2, 3, 4, 3)  # one example, without its axis
    layer = find_layers(conv)[conv.weight]
    torch.testing.assert_close(torch.cat(list(layer.inputs(x))), unfolded(conv, x[None]))
    assert layer.outputs(conv(x)).shape[:1] == (1,)


def test_patches_come_in_pieces_no_larger_than_the_input() -> None:
    conv = seeded(lambda: nn.Conv2d(2, 3, 3, padding=1))
    x = normal(32, 2, 8, 8)
    pieces = list(find_layers(conv)[conv.weight].inputs(x))
    assert len(pieces) > 1
    assert max(piece.numel() for piece in pieces) <= x.numel()


class Doubled(nn.Linear):
    """Not what its class says."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_only_layers_that_are_what_they_seem_are_known() -> None:
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(2, 2),
            "doubled": Doubled(2, 2),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            "attention": nn.MultiheadAttention(2, 1),
            "norm": nn.LayerNorm(2),
            "transposed": nn.ConvTranspose1d(2, 2, 2),
            "conv": nn.Conv1d(2, 2, 2),
        }
    )
    assert {layer.name for layer in find_layers(model).values()} == {"linear", "conv"}
    text = KFACRecorder(model).summary()
    assert "linear.weight" in text
    assert text.count("gradient outer product") == sum(1 for _ in model.parameters()) - 4
    assert isinstance(find_layers(model)[model["conv"].weight], ConvLayer)


def test_tied_weights() -> None:
    """Tied linear layers are one layer; an embedding tied to the output layer is none."""
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight, two.bias = one.weight, one.bias
    layers = find_layers(nn.Sequential(one, two))
    assert [len(layer.modules) for layer in layers.values()] == [2]
    table, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = table.weight
    assert find_layers(nn.Sequential(table, head)) == {}


@pytest.mark.parametrize("value", [4, None, "model"])
def test_model_must_be_a_module(value: object) -> None:
    with pytest.raises(TypeError, match="must be a torch"):
        KFACRecorder(value)
