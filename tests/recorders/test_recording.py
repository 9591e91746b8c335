"""Recording in the situations of real training: what is recorded, and that nothing is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recorders.every_recorder import (
    DETERMINISTIC,
    RECORDERS,
    assert_equal,
    curvatures,
    matrices,
    record,
)
from recorders.networks import labels, normal, seeded
from rootfree.recorders import HutchinsonDiagonal, KFACRecorder

N, CLASSES = 6, 3


class Network(nn.Module):
    """A convolution and two linear layers, with options that must make no difference."""

    def __init__(self, *, inplace: bool = False, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, stride=2, padding=1)
        self.hidden = nn.Linear(12, 5)
        self.head = nn.Linear(5, CLASSES)
        self.inplace, self.checkpointed = inplace, checkpointed

    def body(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.conv(x), inplace=self.inplace).flatten(1)
        return nn.functional.silu(self.hidden(x), inplace=self.inplace)

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None:
            return self.head(self.body(x))
        return self.head(checkpoint(self.body, x, use_reentrant=self.checkpointed))


def data(n: int = N, seed: int = 1) -> tuple[Tensor, Tensor]:
    return normal(n, 2, 4, 4, seed=seed), labels(n, CLASSES, seed=seed)


def recorded(name: str, model: nn.Module, batches: Any, **options: Any) -> Any:
    recorder = RECORDERS[name](model, **options)
    record(recorder, model, batches)
    total = sum(len(y) for _, y in batches)
    return curvatures(recorder, model, batch_size=total)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_micro_batches_equal_one_batch(name: str) -> None:
    model, (x, y) = seeded(Network), data()
    parts = [(x[:1], y[:1]), (x[1:4], y[1:4]), (x[4:], y[4:])]
    assert_equal(recorded(name, model, parts), recorded(name, model, [(x, y)]))


# Reentrant checkpointing allows loss.backward() alone; these ask for other derivatives.
NOT_REENTRANT = ("kfac-type-2", "kfac-sampled", "sampled", "hutchinson")


@pytest.mark.parametrize(
    ("name", "reentrant"),
    [(n, r) for n in RECORDERS for r in (False, True) if not (r and n in NOT_REENTRANT)],
)
def test_checkpointing_makes_no_difference(name: str, reentrant: bool) -> None:
    model, again = seeded(Network), seeded(lambda: Network(checkpointed=reentrant))
    x, y = data()
    x.requires_grad_()  # a reentrant checkpoint wants an input that does
    assert_equal(recorded(name, again, [(x, y)]), recorded(name, model, [(x, y)]))


@pytest.mark.parametrize("name", [name for name in RECORDERS if name != "hutchinson"])
def test_activations_in_place_make_no_difference(name: str) -> None:
    model, again = seeded(Network), seeded(lambda: Network(inplace=True))
    assert_equal(recorded(name, again, [data()]), recorded(name, model, [data()]))


@pytest.mark.parametrize("name", RECORDERS)
def test_frozen_parameters(name: str) -> None:
    """The others' curvature is as before; a bias without its weight, and the reverse, are alone."""
    model, frozen = seeded(Network), seeded(Network)
    frozen.conv.requires_grad_(False)
    frozen.hidden.bias.requires_grad_(False)
    recorder = RECORDERS[name](frozen)
    record(recorder, frozen, [data()])
    result = curvatures(recorder, frozen, batch_size=N)
    assert set(result) == {"hidden.weight", "head.weight", "head.bias"}
    assert recorder.summary().count("frozen") == 3
    if name in DETERMINISTIC:
        whole = recorded(name, model, [data()])
        whole["hidden.weight"] = [
            U[:-1, :-1] if U.shape[-1] == 13 else U for U in whole["hidden.weight"]
        ]
        assert_equal(result, {key: whole[key] for key in result})
    recorder.used()
    with pytest.raises(RuntimeError, match="recorded no backward"):
        recorder.check(list(frozen.parameters()))


@pytest.mark.parametrize("name", RECORDERS)
def test_bfloat16_autocast(name: str) -> None:
    """Sums are float32 and near those of float32 activations: bf16 has 8 bits."""
    model = seeded(Network).float()
    x, y = data()
    exact = recorded(name, model, [(x.float(), y)])
    recorder = RECORDERS[name](model)
    with recorder:
        with torch.autocast("cpu", torch.bfloat16):
            z = model(x.float())
        recorder.backward(nn.functional.cross_entropy(z.float(), y), z)
    result = curvatures(recorder, model, batch_size=N)
    for key, tensors in result.items():
        for a, b in zip(tensors, exact[key], strict=True):
            assert a.dtype == torch.float32
            if name in DETERMINISTIC:
                assert float((a - b).norm() / b.norm()) < 0.05, key


@pytest.mark.parametrize("name", RECORDERS)
def test_a_gradient_scaler_is_taken_out_again(name: str) -> None:
    model = seeded(Network)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorder = RECORDERS[name](model, scaler=scaler)
    record(recorder, model, [data()], scale=scaler.scale)
    assert_equal(curvatures(recorder, model, batch_size=N), recorded(name, model, [data()]))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_a_layer_called_twice_contributes_the_rows_of_both_calls(sharing: str) -> None:
    layer = seeded(lambda: nn.Linear(3, 3))
    x = normal(4, 3)
    recorder = KFACRecorder(layer, sharing=sharing)
    with recorder:
        first = layer(x)
        second = layer(torch.tanh(first))
        first.retain_grad()
        second.retain_grad()
        second.square().mean().backward()
    G, A = recorder.of(layer.weight, batch_size=12).factors
    a = torch.cat([x, torch.tanh(first).detach()])
    a = torch.cat([a, torch.ones(8, 1, dtype=a.dtype)], dim=1)
    g = torch.cat([first.grad, second.grad])
    torch.testing.assert_close(A, a.mT @ a / 8)
    torch.testing.assert_close(G, 12 * g.mT @ g)


def hooks_on(model: nn.Module) -> int:
    return sum(
        len(hooks)
        for module in model.modules()
        for hooks in (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._forward_hooks_with_kwargs,
            module._forward_pre_hooks_with_kwargs,
        )
    )


@pytest.mark.parametrize("name", RECORDERS)
def test_nothing_is_left_on_the_model(name: str) -> None:
    model = seeded(Network)
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    recorder = RECORDERS[name](model)
    assert hooks_on(model) == 0
    record(recorder, model, [data()])
    assert hooks_on(model) == 0
    with pytest.raises(RuntimeError, match="shapes"), recorder:
        model(data()[0][..., :1])  # too small an image
    assert hooks_on(model) == 0
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    record(recorder, model, [data()])  # usable again
    curvatures(recorder, model, batch_size=N)


@pytest.mark.parametrize("name", RECORDERS)
def test_gradients_are_those_of_an_ordinary_backward(name: str) -> None:
    model, (x, y) = seeded(Network), data()
    nn.functional.cross_entropy(model(x), y).backward()
    expected = [p.grad for p in model.parameters()]
    for due in (True, False):
        model.zero_grad()
        recorder = RECORDERS[name](model)
        with recorder.when(due):
            z = model(x)
            recorder.backward(nn.functional.cross_entropy(z, y), z)
        for p, g in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, g)


@pytest.mark.parametrize("name", RECORDERS)
def test_a_skipped_step_records_nothing_and_a_new_context_starts_anew(name: str) -> None:
    model, (x, y) = seeded(Network), data()
    recorder = RECORDERS[name](model)
    record(recorder, model, [data(seed=9)])
    with recorder.when(False):
        assert hooks_on(model) == 0
        z = model(x)
        recorder.backward(nn.functional.cross_entropy(z, y), z)
    with pytest.raises(RuntimeError, match="recorded no backward"):
        recorder.check(list(model.parameters()))
    record(recorder, model, [data(seed=9)])
    record(recorder, model, [(x, y)])  # the first was never used: a step that did not refresh
    if name in DETERMINISTIC:
        assert_equal(curvatures(recorder, model, batch_size=N), recorded(name, model, [(x, y)]))


@pytest.mark.parametrize("name", ["kfac", "per-example"])
def test_only_what_is_differentiated_inside_counts(name: str) -> None:
    model, (x, y) = seeded(Network), data()
    recorder = RECORDERS[name](model)
    outside = nn.functional.cross_entropy(model(x), y)
    with recorder:
        model(data(seed=4)[0])  # not differentiated
        with torch.no_grad():
            model(data(seed=5)[0])
        outside.backward()  # its forward pass was not recorded
        late = nn.functional.cross_entropy(model(data(seed=6)[0]), y)
        nn.functional.cross_entropy(model(x), y).backward()
    late.backward()  # after the context
    assert_equal(curvatures(recorder, model, batch_size=N), recorded(name, model, [(x, y)]))


def test_hutchinson_averages_to_the_diagonal_of_the_hessian() -> None:
    """Within five standard errors of the exact diagonal, which each probe estimates unbiased."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)))
    x, y = normal(N, 3), labels(N, CLASSES)
    p = model[0].weight

    def loss_of(w: Tensor) -> Tensor:
        z = torch.func.functional_call(model, {"0.weight": w}, (x,))
        return nn.functional.cross_entropy(z, y)

    H = torch.func.hessian(loss_of)(p.detach())
    exact = torch.einsum("abab->ab", H)
    draws = 400
    recorder = HutchinsonDiagonal(model, seed=0)
    estimates = []
    for _ in range(draws):
        record(recorder, model, [(x, y)])
        estimates.append(recorder.of(p, batch_size=N).h)
    h = torch.stack(estimates)
    error = (h.mean(0) - exact).abs()
    bound = 5 * h.std(0) / draws**0.5
    assert (error < bound).all()
    assert not ((2 * h.mean(0) - exact).abs() < bound).all()
    many = HutchinsonDiagonal(model, samples=draws, seed=0)
    record(many, model, [(x, y)])
    torch.testing.assert_close(many.of(p, batch_size=N).h, h.mean(0))


def test_hutchinson_is_exact_for_a_diagonal_hessian_and_zero_for_a_linear_loss() -> None:
    model = seeded(lambda: nn.Linear(3, 1))
    recorder = HutchinsonDiagonal(model, seed=0)
    with recorder:
        recorder.backward((torch.arange(3.0).double() * model.weight**2).sum())
    torch.testing.assert_close(
        recorder.of(model.weight, batch_size=1).h, 2 * torch.arange(3.0).double()[None]
    )
    assert recorder.of(model.bias, batch_size=1) is None
    with recorder:
        recorder.backward(model(normal(2, 3)).sum())
    assert matrices(recorder.of(model.weight, batch_size=1))[0].abs().max() == 0
