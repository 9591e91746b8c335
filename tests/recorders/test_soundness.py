"""Recorders are right or say that they are not: each case here once gave a wrong curvature."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import rootfree
from recorders.every_recorder import RECORDERS, record
from recorders.networks import labels, normal, seeded
from rootfree.recorders import KFACRecorder, MonteCarloFisherRecorder, PerExampleFisherRecorder
from rootfree.recorders.losses import LOSSES

F = nn.functional
N, CLASSES = 6, 3


class Functional(nn.Module):
    """A weight that a module and a function use."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.head = nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.linear(self.e(x).tanh(), self.e.weight))


class Tied(nn.Module):
    """Logits by the embedding's own weight, without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(CLASSES, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.e(x).sum(1), self.e.weight)


class Mixing(nn.Module):
    """A module of which an example alone is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(0))


class Positions(nn.Module):
    """A layer at every position, whose axis is the first or the second one inside."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.inside, self.head, self.first = nn.Linear(4, 5), nn.Linear(5, CLASSES), first

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x.transpose(0, 1) if self.first else x).tanh()
        return self.head(h.mean(0 if self.first else 1))


class Splitting(nn.Module):
    """A model that works on its batch in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inside(part) for part in x.split(2)])


def recorded(recorder, model: nn.Module, x: Tensor):
    """Forward and backward inside the context, and the check that an optimizer makes."""
    model.zero_grad()
    with recorder:
        F.cross_entropy(model(x), labels(N, CLASSES)).backward()
    recorder.check(list(model.parameters()))
    return recorder


def weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(4, CLASSES))


indices = torch.arange(N * 2).view(N, 2) % CLASSES
UNSOUND = {
    "weight_norm": (weight_norm, normal(N, 4), "weight_g"),
    "spectral_norm": (
        lambda: nn.utils.spectral_norm(nn.Linear(4, CLASSES)),
        normal(N, 4),
        "weight_orig",
    ),
    "mixing": (lambda: nn.Sequential(nn.Linear(4, CLASSES), Mixing()), normal(N, 4), "1.weight"),
    "functional": (Functional, normal(N, 4), "e.weight"),
    "tied": (Tied, indices, "e.weight"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_per_example_gradients_that_do_not_add_up_are_left_out(case):
    make, x, name = UNSOUND[case]
    model = seeded(make)
    recorder = PerExampleFisherRecorder(model)
    with pytest.warns(UserWarning, match=f"{name} keeps the gradient outer product"):
        recorded(recorder, model, x)
    p = model.get_parameter(name)
    assert recorder.of(p, batch_size=N) is None
    assert "gradient outer product" in recorder.summary()
    with warnings.catch_warnings():  # once is enough
        warnings.simplefilter("error")
        recorded(recorder, model, x)
    assert recorder.of(p, batch_size=N) is None


@pytest.mark.parametrize("case", ["functional", "tied"])
@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
def test_kfac_of_a_weight_that_is_used_elsewhere_is_left_out(case, fisher):
    make, x, name = UNSOUND[case]
    model = seeded(make)
    recorder = KFACRecorder(model, fisher=fisher, loss="cross_entropy")
    with recorder:
        z = model(x)
        recorder.backward(F.cross_entropy(z, labels(N, CLASSES)), z)
    with pytest.warns(UserWarning, match=f"{name} keeps the gradient outer product"):
        recorder.check(list(model.parameters()))
    assert recorder.of(model.get_parameter(name), batch_size=N) is None
    if case == "functional":  # the other layer is as it was
        assert recorder.of(model.head.weight, batch_size=N) is not None


@pytest.mark.parametrize("make", [KFACRecorder, PerExampleFisherRecorder])
def test_an_optimizer_goes_on_with_what_is_left_out(make):
    model = seeded(Functional)
    recorder = make(model)
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=N, curvature=recorder)
    before = model.e.weight.detach().clone()
    with recorder:
        F.cross_entropy(model(normal(N, 4)), labels(N, CLASSES)).backward()
    with pytest.warns(UserWarning, match="used elsewhere"):
        optimizer.step()
    assert not torch.equal(model.e.weight, before)


@pytest.mark.parametrize("make", [KFACRecorder, PerExampleFisherRecorder])
def test_gradients_divided_by_frequency_are_left_out(make):
    embedding = nn.Embedding(CLASSES, 4, scale_grad_by_freq=True)
    model = seeded(lambda: nn.Sequential(embedding, nn.Flatten(), nn.Linear(8, CLASSES)))
    recorder = recorded(make(model), model, indices)
    assert recorder.of(model[0].weight, batch_size=N) is None
    assert recorder.of(model[2].weight, batch_size=N) is not None


@pytest.mark.parametrize("length", [N, N + 1])
def test_examples_on_another_axis_are_not_taken_for_the_first(length):
    """With as many positions as examples the shapes alone do not tell."""
    x = normal(N, length, 4)
    model = seeded(lambda: Positions(first=True))
    recorder = recorded(PerExampleFisherRecorder(model), model, x)
    assert recorder.of(model.inside.weight, batch_size=N) is None
    assert recorder.of(model.head.weight, batch_size=N) is not None
    reduce = KFACRecorder(model, sharing="reduce")
    with pytest.warns(UserWarning, match=r"inside.weight keeps .*first axis"):
        recorded(reduce, model, x)
    assert reduce.of(model.inside.weight, batch_size=N) is None


def test_examples_on_the_first_axis_are_known_beside_as_many_positions():
    x, model = normal(N, N, 4), seeded(lambda: Positions(first=False))
    H = recorded(PerExampleFisherRecorder(model), model, x).of(model.inside.weight, batch_size=N)
    for i, y in enumerate(labels(N, CLASSES)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[None]).backward()
        torch.testing.assert_close(H.V[i] * N**0.5, model.inside.weight.grad)
    reduce = recorded(KFACRecorder(model, sharing="reduce"), model, x)
    assert reduce.of(model.inside.weight, batch_size=N) is not None


def test_biases_whose_gradient_is_rounding_alone_are_recorded_with_their_weights():
    """Batch norm takes off the mean: both sums of the bias's gradient are noise, and differ."""
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(392, CLASSES)
        )
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder = recorded(PerExampleFisherRecorder(model), model, normal(N, 3, 9, 9))
    weight, bias = model[0].parameters()
    assert bias.grad.norm() < 1e-4 * weight.grad.norm()
    V = recorder.of(weight, batch_size=N).V.sum(0) / N**0.5
    torch.testing.assert_close(V.view_as(weight), weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", RECORDERS)
def test_a_first_batch_that_is_not_finite_is_left_out_and_settles_nothing(name):
    """Targets cannot be drawn from NaN, and no gradient is equal to it."""
    model, x = seeded(lambda: Positions(first=False)), normal(N, N, 4)
    recorder = RECORDERS[name](model)
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=N, curvature=recorder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in (torch.full_like(x, torch.nan), x):
            optimizer.zero_grad()
            record(recorder, model, [(batch, labels(N, CLASSES))])
            found = {p: recorder.of(p, batch_size=N) for p in model.parameters()}
            optimizer.step()
    assert optimizer.skipped_steps == 1
    assert None not in found.values()


def test_targets_of_binary_cross_entropy_cannot_be_drawn_from_nan():
    z = torch.tensor([0.5, torch.nan, -1.0])
    g = LOSSES["binary_cross_entropy"].sample(z, torch.Generator().manual_seed(0))
    assert g.isnan().tolist() == [False, True, False]


def test_a_model_that_splits_its_batch_is_refused_for_that():
    model = seeded(Splitting)
    recorder = PerExampleFisherRecorder(model)
    with pytest.raises(RuntimeError, match=r"the 6 examples .* Linear got \(2, 4\)") as refused:
        recorded(recorder, model, normal(N, 4))
    assert "backward pass" not in str(refused.value)


def test_parts_of_a_batch_one_by_one_are_the_batch():
    """What the refusal above asks for."""
    model = seeded(Splitting)
    recorder = PerExampleFisherRecorder(model)
    with recorder:
        for part, y in zip(normal(N, 4).split(2), labels(N, CLASSES).split(2), strict=True):
            (F.cross_entropy(model(part), y, reduction="sum") / N).backward()
    recorder.check(list(model.parameters()))
    found = recorder.of(model.inside.weight, batch_size=N).V
    whole = recorded(PerExampleFisherRecorder(model.inside), model.inside, normal(N, 4))
    torch.testing.assert_close(found, whole.of(model.inside.weight, batch_size=N).V)


def test_batch_norm_of_vectors_has_per_example_gradients():
    model = seeded(lambda: nn.Sequential(nn.Linear(4, CLASSES), nn.BatchNorm1d(CLASSES)))
    recorder = recorded(PerExampleFisherRecorder(model), model, normal(N, 4))
    for p in model[1].parameters():
        V = recorder.of(p, batch_size=N).V
        torch.testing.assert_close(V.sum(0) / N**0.5, p.grad)


# -- several output positions ----------------------------------------------------------------

OUTPUTS = {
    "cross_entropy": [(2, 3), (2, 3, 4), (2, 2, 2, 3)],
    "mse": [(2, 3), (2, 3, 2), (2, 2, 2, 2)],
    "binary_cross_entropy": [(2, 3), (2, 2, 3)],
}
VALUES = {
    "cross_entropy": lambda z: F.cross_entropy(z, z.argmax(1), reduction="sum"),
    "mse": lambda z: z.square().sum(),
    "binary_cross_entropy": lambda z: F.binary_cross_entropy_with_logits(
        z, torch.ones_like(z), reduction="sum"
    ),
}


@pytest.mark.parametrize(("loss", "shape"), [(k, s) for k, each in OUTPUTS.items() for s in each])
def test_roots_are_those_of_the_hessian_of_each_example(loss, shape):
    z = normal(*shape)
    roots = torch.stack(list(LOSSES[loss].roots(z)))
    for i in range(len(z)):
        H = torch.autograd.functional.hessian(VALUES[loss], z[i : i + 1])
        s = roots[:, i].flatten(1)
        torch.testing.assert_close(s.mT @ s, H.reshape(s.shape[1], -1))


class TokenMixing(nn.Module):
    """Every position depends on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)  # (n, classes, positions), mixed along the positions


@pytest.mark.parametrize("make", [MonteCarloFisherRecorder, KFACRecorder])
def test_targets_are_drawn_at_every_position(make):
    more = {"fisher": "monte-carlo"} if make is KFACRecorder else {}
    model = seeded(TokenMixing)
    recorder = make(model, loss="cross_entropy", **more)
    with recorder:
        z = model(normal(N, CLASSES, 4))
        y = torch.zeros(N, 4, dtype=torch.int64)
        recorder.backward(F.cross_entropy(z, y), z)
    assert recorder.of(model.mix.weight, batch_size=4 * N) is not None


def test_outputs_with_examples_and_positions_in_one_axis_are_refused():
    model = seeded(TokenMixing)
    recorder = KFACRecorder(model, fisher="type-2", loss="cross_entropy")
    with recorder:
        z = model(normal(N, CLASSES, 4)).transpose(1, 2).flatten(0, 1)
        loss = F.cross_entropy(z, torch.zeros(4 * N, dtype=torch.int64))
        with pytest.raises(ValueError, match=f"one row for each of the {N} examples"):
            recorder.backward(loss, z)


def test_very_many_passes_are_refused():
    model = seeded(lambda: nn.Linear(4, 5000, bias=False))
    recorder = KFACRecorder(model, fisher="type-2", loss="cross_entropy")
    with recorder:
        z = model(normal(N, 4))
        with pytest.raises(ValueError, match="5000 terms an example"):
            recorder.backward(F.cross_entropy(z, labels(N, 5)), z)
