"""Empirical and sampled Fisher matrices against brute force, and their statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from recorders.networks import dense, labels, normal, relative, rows_by, seeded
from rootfree.recorders import KFACRecorder, MonteCarloFisherRecorder, PerExampleFisherRecorder

N, CLASSES = 5, 3
TOLERANCE = 1e-12


class EveryLayer(nn.Module):
    """Embedding, convolutions, norms, a layer used twice, an activation with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, padding_idx=0)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(4)
        self.twice = nn.Linear(4, 4)
        self.activation = nn.PReLU()
        self.group_norm = nn.GroupNorm(2, 4)
        self.batch_norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, CLASSES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = self.norm(x + self.conv(x.mT).mT)
        x = self.twice(self.activation(self.twice(x)))
        return self.head(self.batch_norm(self.group_norm(x.mT)).mean(2))


def make_case() -> tuple[nn.Module, Tensor, Tensor]:
    model = seeded(EveryLayer)
    model.batch_norm.eval()  # examples are independent only with fixed statistics
    generator = torch.Generator().manual_seed(3)
    return model, torch.randint(0, 7, (N, 6), generator=generator), labels(N, CLASSES)


def terms_of(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    return list(nn.functional.cross_entropy(model(x), y, reduction="none"))


def test_per_example_gradients_are_those_of_the_terms() -> None:
    model, x, y = make_case()
    recorder = PerExampleFisherRecorder(model, loss="cross_entropy")
    with recorder:
        outputs = model(x)
        recorder.backward(nn.functional.cross_entropy(outputs, y), outputs)
    params = list(model.parameters())
    recorder.check(params)
    exact = rows_by(terms_of(model, x, y), params)
    for name, p in model.named_parameters():
        V = recorder.of(p, batch_size=N).V
        torch.testing.assert_close(V, exact[p] / math.sqrt(N), rtol=1e-10, atol=1e-12, msg=name)
    assert "outer product" not in recorder.summary()


class Moody(nn.Module):
    """Looks at values to decide what to do, which torch.func cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (x if x.sum() > 0 else -x)


class Positions(nn.Module):
    """Rows of a table that are added to every example: no example axis."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.shift = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.table(torch.arange(4)) + self.shift).tanh().mean(1))


def test_where_there_are_no_per_example_gradients_the_default_is_used() -> None:
    model, x = seeded(lambda: nn.Sequential(nn.Linear(2, 3), Moody())), normal(N, 2)
    recorder = PerExampleFisherRecorder(model)
    for _ in range(2):
        with recorder:
            model(x).square().mean().backward()
        assert recorder.of(model[1].scale, batch_size=N) is None
        assert recorder.of(model[0].weight, batch_size=N) is not None
    assert "gradient outer product (no per-example gradients of Moody)" in recorder.summary()
    model = seeded(Positions)
    recorder = PerExampleFisherRecorder(model)
    with recorder:
        model(normal(N, 4, 3)).square().mean().backward()
    known = {n for n, p in model.named_parameters() if recorder.of(p, batch_size=N) is not None}
    assert known == {"head.weight", "head.bias"}
    assert recorder.summary().count("gradient outer product") == 2


def test_summed_loss_gives_the_sum() -> None:
    model, x, y = make_case()
    recorder = PerExampleFisherRecorder(model)
    with recorder:
        nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    g = rows_by(terms_of(model, x, y), [model.head.weight])[model.head.weight].flatten(1)
    H = dense(recorder.of(model.head.weight, batch_size=1))
    assert relative(H, g.mT @ g) < TOLERANCE


def test_batch_norm_in_training_mode() -> None:
    """The rows add up to the gradient."""
    model, x, y = make_case()
    model.train()
    recorder = PerExampleFisherRecorder(model)
    with recorder:
        nn.functional.cross_entropy(model(x), y).backward()
    for p in (model.batch_norm.weight, model.batch_norm.bias, model.conv.weight):
        V = recorder.of(p, batch_size=N).V
        torch.testing.assert_close(V.sum(0) / math.sqrt(N), p.grad)


@pytest.mark.parametrize("n", [1, 4])
def test_standard_and_joint_empirical_fisher(n: int) -> None:
    """B ḡḡᵀ, the default, is the per-example one for N = 1; for N > 1 it has rank one, and

    B ḡḡᵀ = (1/B) Σᵢⱼ gᵢgⱼᵀ differs by the cross terms i ≠ j.
    """
    model, x, y = make_case()
    x, y = x[:n], y[:n]
    recorder = PerExampleFisherRecorder(model)
    with recorder:
        nn.functional.cross_entropy(model(x), y).backward()
    p = model.head.weight
    H, g = dense(recorder.of(p, batch_size=n)), p.grad.flatten()
    joint = n * g[:, None] * g
    rows = rows_by(terms_of(model, x, y), [p])[p].flatten(1)
    cross = rows.sum(0)[:, None] * rows.sum(0) - rows.mT @ rows
    assert relative(joint, H + cross / n) < TOLERANCE
    assert torch.linalg.matrix_rank(joint) == 1
    if n == 1:
        assert relative(H, joint) < TOLERANCE
    else:
        assert relative(H, joint) > 0.1
        assert torch.linalg.matrix_rank(H) == n


def exact_fisher(model: nn.Module, z: Tensor, p: nn.Parameter, loss: str) -> Tensor:
    """(1/terms) Jᵀ blockdiag(∇²ℓ) J."""
    J = rows_by(list(z.flatten()), [p])[p].flatten(1)
    if loss == "cross_entropy":
        q = z.detach().softmax(1)
        return J.mT @ torch.block_diag(*(a.diag() - a[:, None] * a for a in q)) @ J / len(z)
    q = z.detach().sigmoid()
    curvature = 2 * torch.ones_like(z) if loss == "mse" else q * (1 - q)
    return J.mT @ (curvature.flatten()[:, None] * J) / z.numel()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, CLASSES))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "binary_cross_entropy"])
def test_mini_batch_fisher_is_unbiased(loss: str) -> None:
    """The mean over many draws is the exact Fisher, within five standard errors everywhere."""
    model, x = seeded(small), normal(4, 2)
    draws = 3000
    recorder = MonteCarloFisherRecorder(model, loss=loss, samples=draws, seed=0)
    with recorder:
        z = model(x)
        recorder.backward(z.sum() * 0, z)
    p = model[0].weight
    B = len(z) if loss == "cross_entropy" else z.numel()
    V = recorder.of(p, batch_size=B).V.flatten(1) * math.sqrt(draws)
    H = V[:, :, None] * V[:, None, :]  # one estimate a draw
    error = (H.mean(0) - exact_fisher(model, model(x), p, loss)).abs()
    assert (error < 5 * H.std(0) / math.sqrt(draws)).all()
    # and the tolerance would notice a wrong scale
    wrong = (1.3 * H.mean(0) - exact_fisher(model, model(x), p, loss)).abs()
    assert not (wrong < 5 * H.std(0) / math.sqrt(draws)).all()


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "binary_cross_entropy"])
def test_sampled_kfac_tends_to_the_exact_one(loss: str) -> None:
    model, x = seeded(small), normal(4, 2)
    factors = {}
    for fisher, samples in (("type-2", 1), ("monte-carlo", 3000)):
        recorder = KFACRecorder(model, fisher=fisher, loss=loss, samples=samples, seed=0)
        with recorder:
            z = model(x)
            recorder.backward(z.sum() * 0, z)
        B = len(z) if loss == "cross_entropy" else z.numel()
        factors[fisher] = recorder.of(model[0].weight, batch_size=B).factors
    (G, A), (G_sampled, A_sampled) = factors["type-2"], factors["monte-carlo"]
    torch.testing.assert_close(A, A_sampled)
    # A draw's relative deviation is of order one: 3000 draws leave about 2 %.
    assert relative(G_sampled, G) < 0.1


def test_type_2_is_the_fisher_of_the_last_layer_for_one_datum() -> None:
    model, x = seeded(small), normal(1, 2)
    recorder = KFACRecorder(model, fisher="type-2", loss="binary_cross_entropy", joint=False)
    with recorder:
        z = model(x)
        recorder.backward(z.sum() * 0, z)
    p = model[2].weight
    H = dense(recorder.of(p, batch_size=z.numel()))
    assert relative(H, exact_fisher(model, model(x), p, "binary_cross_entropy")) < TOLERANCE


@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "binary_cross_entropy"])
@pytest.mark.parametrize("positions", [(), (2,)])
def test_an_exact_hessian_without_examples_is_zero(loss: str, positions: tuple[int, ...]) -> None:
    """As on a rank whose part of the batch is empty."""
    layer = nn.Linear(4, CLASSES)
    recorder = KFACRecorder(layer, fisher="type-2", loss=loss)
    with recorder:
        outputs = layer(normal(0, *positions, 4).to(layer.weight.dtype)).movedim(-1, 1)
        recorder.backward(outputs.sum(), outputs)
    H = recorder.of(layer.weight, batch_size=1)
    assert H is not None
    assert H.factors[0].count_nonzero() == 0


def test_cross_entropy_over_positions() -> None:
    """Classes are on axis 1, as F.cross_entropy has them; every position is a term."""
    model = seeded(lambda: nn.Conv1d(2, CLASSES, 1))
    x = normal(2, 2, 5)
    recorder = KFACRecorder(model, fisher="type-2", loss="cross_entropy")
    with recorder:
        z = model(x)
        recorder.backward(nn.functional.cross_entropy(z, torch.zeros(2, 5).long()), z)
    flat = seeded(lambda: nn.Linear(2, CLASSES))
    with torch.no_grad():
        flat.weight.copy_(model.weight.squeeze(2))
        flat.bias.copy_(model.bias)
    other = KFACRecorder(flat, fisher="type-2", loss="cross_entropy")
    with other:
        z = flat(x.mT.reshape(10, 2))
        other.backward(nn.functional.cross_entropy(z, torch.zeros(10).long()), z)
    for U, W in zip(
        recorder.of(model.weight, batch_size=10).factors,
        other.of(flat.weight, batch_size=10).factors,
        strict=True,
    ):
        torch.testing.assert_close(U, W)


def test_sampling_does_not_touch_the_global_random_numbers() -> None:
    model, x = seeded(small), normal(4, 2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with MonteCarloFisherRecorder(model, loss="mse") as recorder:
        z = model(x)
        recorder.backward(z.sum(), z)
    torch.testing.assert_close(torch.rand(3), expected)
