"""Where theory says so, KFAC is the exact Gauss-Newton or Fisher matrix of a layer.

Deep linear networks with a square loss: the gradient factor does not depend on the data, so the
expectation of the Kronecker product is the product of expectations. With weight sharing this holds
for "expand" when every position has its own loss term, and for "reduce" when the loss sees the
average over positions (Eschenhagen et al., 2023).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from recorders.networks import dense, joint_matrix, labels, normal, relative, rows_by, seeded
from rootfree.recorders import KFACRecorder

TOLERANCE = 1e-12  # float64, a few hundred terms


def gauss_newton(model: nn.Module, layer: nn.Module, outputs: Tensor, hessian: Tensor) -> Tensor:
    """Jᵀ ∇²L J for [W b] of a layer; hessian (outputs.numel(),)*2, of the whole loss."""
    params = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
    J = joint_matrix(layer, rows_by(list(outputs.flatten()), params))
    return J.mT @ hessian @ J


def check(model: nn.Module, x: Tensor, sharing: str, *, reduction: str = "mean") -> None:
    """Type-2 KFAC with the square loss is the Gauss-Newton matrix, for each layer."""
    recorder = KFACRecorder(model, fisher="type-2", loss="mse", sharing=sharing)
    with recorder:
        outputs = model(x)
        target = torch.zeros_like(outputs)
        recorder.backward(nn.functional.mse_loss(outputs, target, reduction=reduction), outputs)
    recorder.check(list(model.parameters()))
    terms = outputs.numel() if reduction == "mean" else 1
    outputs = model(x)
    hessian = 2 / terms * torch.eye(outputs.numel(), dtype=torch.float64)
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            H = recorder.of(layer.weight, batch_size=terms)
            assert relative(dense(H), gauss_newton(model, layer, outputs, hessian)) < TOLERANCE


class Average(nn.Module):
    """The mean over the positions: axis 1 of tokens, the last axes of images."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1) if x.dim() == 3 else x.flatten(2).mean(2)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, bias=False), nn.Linear(2, 3))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_deep_linear_network_with_square_loss(sharing: str, reduction: str) -> None:
    check(seeded(deep), normal(5, 3), sharing, reduction=reduction)


def test_expand_where_every_position_has_its_loss() -> None:
    check(seeded(deep), normal(4, 6, 3), "expand")


def test_reduce_where_the_loss_sees_the_average() -> None:
    make = lambda: nn.Sequential(nn.Linear(3, 4), Average(), nn.Linear(4, 2))  # noqa: E731
    check(seeded(make), normal(4, 6, 3), "reduce")


@pytest.mark.parametrize("padding", [0, 1])
def test_reduce_for_linear_convolutions_with_pooling(padding: int) -> None:
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(2, 3, 2, stride=2, padding=padding), Average(), nn.Linear(3, 2)
    )
    check(seeded(make), normal(4, 2, 6, 4), "reduce")


def test_the_settings_differ_where_the_other_is_exact() -> None:
    make = lambda: nn.Sequential(nn.Linear(3, 4), Average(), nn.Linear(4, 2))  # noqa: E731
    with pytest.raises(AssertionError):
        check(seeded(make), normal(4, 6, 3), "expand")
    with pytest.raises(AssertionError):
        check(seeded(deep), normal(4, 6, 3), "reduce")


def test_one_datum_cross_entropy() -> None:
    """The last layer's Gauss-Newton matrix is ∇²ℓ ⊗ aaᵀ for one datum; type-2 has it exactly."""
    model, x = seeded(lambda: nn.Linear(3, 4)), normal(1, 3)
    recorder = KFACRecorder(model, fisher="type-2", loss="cross_entropy")
    with recorder:
        z = model(x)
        recorder.backward(nn.functional.cross_entropy(z, labels(1, 4)), z)
    p = z.detach().softmax(1)[0]
    hessian = p.diag() - p[:, None] * p
    exact = gauss_newton(model, model, model(x), hessian)
    assert relative(dense(recorder.of(model.weight, batch_size=1)), exact) < TOLERANCE


def test_one_datum_empirical_is_the_outer_product_of_its_gradient() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    recorder = KFACRecorder(model)
    with recorder:
        nn.functional.cross_entropy(model(normal(1, 3)), labels(1, 3)).backward()
    for layer in (model[0], model[2]):
        g = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], dim=1).flatten()
        H = dense(recorder.of(layer.weight, batch_size=1))
        assert relative(H, g[:, None] * g) < TOLERANCE


@pytest.mark.parametrize("padding_idx", [None, 1])
def test_embedding_is_a_linear_layer_of_one_hot_inputs(padding_idx: int | None) -> None:
    table = seeded(lambda: nn.Embedding(5, 3, padding_idx=padding_idx))
    head = seeded(lambda: nn.Linear(3, 2), seed=1)
    model = nn.Sequential(table, head)
    tokens = torch.tensor([0, 1, 1, 3, 4, 3])
    recorder = KFACRecorder(model, fisher="type-2", loss="mse")
    with recorder:
        outputs = model(tokens)
        recorder.backward(outputs.square().sum(), outputs)
    H = dense(recorder.of(table.weight, batch_size=1))
    J = rows_by(list(model(tokens).flatten()), [table.weight])[table.weight].flatten(1)
    exact = 2 * J.mT @ J
    assert relative(H, exact) < TOLERANCE


def test_embedding_reduced_has_the_squared_frequencies() -> None:
    table = seeded(lambda: nn.Embedding(5, 3))
    tokens = torch.tensor([[0, 1, 1, 1], [3, 4, 3, 4]])
    recorder = KFACRecorder(table, sharing="reduce")
    with recorder:
        table(tokens).mean(1).square().sum().backward()
    A, _ = recorder.of(table.weight, batch_size=1).factors
    frequencies = nn.functional.one_hot(tokens, 5).double().mean(1)
    torch.testing.assert_close(A, frequencies.square().mean(0))


def test_weight_and_bias_apart() -> None:
    model, x = seeded(lambda: nn.Linear(3, 4)), normal(6, 3)
    together, apart = KFACRecorder(model), KFACRecorder(model, joint=False)
    assert apart.joint() == []
    for recorder in (together, apart):
        with recorder:
            model(x).square().sum(1).mean().backward()
    G, A = together.of(model.weight, batch_size=6).factors
    G2, A2 = apart.of(model.weight, batch_size=6).factors
    (Gb,) = apart.of(model.bias, batch_size=6).factors
    torch.testing.assert_close((G2, A2, Gb), (G, A[:-1, :-1], G))


def test_long_axes_get_the_diagonal() -> None:
    model, x = seeded(lambda: nn.Linear(3, 4)), normal(6, 3)
    whole, cut = KFACRecorder(model), KFACRecorder(model, max_dense=2)
    for recorder in (whole, cut):
        with recorder:
            model(x).square().sum(1).mean().backward()
    for U, u in zip(
        whole.of(model.weight, batch_size=6).factors,
        cut.of(model.weight, batch_size=6).factors,
        strict=True,
    ):
        torch.testing.assert_close(u, U.diagonal())
