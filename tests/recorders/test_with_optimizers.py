"""Recorders in the hands of the optimizers: trajectories, refresh intervals, refused steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rootfree
from recorders.every_recorder import RECORDERS, record
from recorders.networks import labels, normal, seeded
from rootfree.recorders import KFACRecorder, MonteCarloFisherRecorder, PerExampleFisherRecorder

N, CLASSES = 6, 3
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "IFShampoo": rootfree.IFShampoo,
    "RFShampoo": rootfree.RFShampoo,
    "RFRMSprop": rootfree.RFRMSprop,
}


def network() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
            nn.LayerNorm(12),
            nn.Linear(12, CLASSES),
        )
    )


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    return normal(N, 2, 4, seed=seed), labels(N, CLASSES, seed=seed)


def values(model: nn.Module, optimizer: Any) -> list[Tensor]:
    states = [t for p in model.parameters() for _, t in sorted(optimizer.state[p].items())]
    return [t.detach().clone() for t in (*model.parameters(), *states)]


def assert_untouched(before: list[Tensor], model: nn.Module, optimizer: Any) -> None:
    for a, b in zip(before, values(model, optimizer), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("method", OPTIMIZERS)
@pytest.mark.parametrize("name", RECORDERS)
def test_every_method_takes_every_recorder_and_the_loss_falls(name: str, method: str) -> None:
    model = network()
    recorder = RECORDERS[name](model)
    optimizer = OPTIMIZERS[method](
        model.parameters(), lr=0.02, batch_size=N, damping=0.1, curvature=recorder
    )
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        record(recorder, model, [batch()])
        optimizer.step()
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(batch()[0]), batch()[1])))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", RECORDERS)
def test_averaged_and_summed_losses_take_the_same_steps(name: str) -> None:
    """Preconditioner and damping are curvatures: for the sum they start N times as large."""
    runs = []
    for reduction, B in (("mean", N), ("sum", 1)):
        model = network()
        recorder = RECORDERS[name](model)
        c = N if reduction == "sum" else 1
        optimizer = rootfree.RFRMSprop(
            model.parameters(), lr=0.02, batch_size=B, damping=0.1 * c, curvature=recorder
        )
        for p in model.parameters():
            optimizer.state[p]["preconditioner"].fill_(float(c))
        for t in range(5):
            x, y = batch(seed=t)
            optimizer.zero_grad()
            with recorder:
                z = model(x)
                recorder.backward(nn.functional.cross_entropy(z, y, reduction=reduction), z)
            optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_refresh_every_other_step_with_and_without_recording_in_between() -> None:
    runs = []
    for skip in (True, False):
        model = network()
        recorder = KFACRecorder(model)
        optimizer = rootfree.IFShampoo(
            model.parameters(), batch_size=N, update_every=2, curvature=recorder
        )
        for t in range(6):
            x, y = batch(seed=t)
            optimizer.zero_grad()
            with recorder.when(t % 2 == 0 or not skip):
                recorder.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", RECORDERS)
def test_a_step_without_a_recorded_backward_is_refused(name: str) -> None:
    model = network()
    recorder = RECORDERS[name](model)
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=N, curvature=recorder)
    before = values(model, optimizer)
    x, y = batch()
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(RuntimeError, match="recorded no backward pass"):
        optimizer.step()
    assert_untouched(before, model, optimizer)
    record(recorder, model, [batch()])
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].zero_()  # the next step refreshes too
    before = values(model, optimizer)
    with pytest.raises(
        RuntimeError, match=r"recorded no backward pass.* uses up what was recorded"
    ):
        optimizer.step()  # recordings are used once
    assert_untouched(before, model, optimizer)


def test_two_optimizers_have_a_recorder_each() -> None:
    model = network()
    params = list(model.parameters())
    recorders = [rootfree.KFACRecorder(model) for _ in range(2)]
    options = {"batch_size": N, "update_every": 1}
    optimizers = [
        rootfree.IFShampoo(part, curvature=recorder, **options)
        for part, recorder in zip((params[:2], params[2:]), recorders, strict=True)
    ]
    one = network()
    recorder = rootfree.KFACRecorder(one)
    together = rootfree.IFShampoo(one.parameters(), curvature=recorder, **options)
    for t in range(2):
        x, y = batch(seed=t)
        for each in (model, one):
            each.zero_grad()
        with recorders[0], recorders[1]:
            nn.functional.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
        record(recorder, one, [(x, y)])
        together.step()
    for p, q in zip(params, one.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", RECORDERS)
def test_a_model_that_changed_is_refused(name: str) -> None:
    model = network()
    recorder = RECORDERS[name](model)
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=N, curvature=recorder)
    record(recorder, model, [batch()])
    head = model[4]
    old, shape = head.weight, head.weight.data
    head.weight = nn.Parameter(old.detach().clone())
    with pytest.raises(RuntimeError, match=r"4\.weight of the model was replaced"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"4\.weight of the model was replaced"):
        recorder.__enter__()
    head.weight = old
    model[4] = copy.deepcopy(head)
    with pytest.raises(RuntimeError, match=r"4\.weight of the model was replaced"):
        optimizer.step()
    model[4] = head
    head.weight.data = torch.zeros(CLASSES, 24, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"was \(3, 12\) on cpu .* is \(3, 24\) on cpu"):
        recorder.check(list(model.parameters()))
    head.weight.data = shape
    optimizer.step()


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("name", RECORDERS)
def test_a_copy_of_everything_goes_on_as_the_original(name: str, how: str) -> None:
    model = network()
    recorder = RECORDERS[name](model)
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=N, curvature=recorder)
    runs = [(model, recorder, optimizer)]
    for t in range(4):
        if t == 1:
            copied = copy.deepcopy(runs[0]) if how == "deepcopy" else None
            runs.append(copied or pickle.loads(pickle.dumps(runs[0])))
        for net, curvature, each in runs:
            each.zero_grad()
            record(curvature, net, [batch(seed=t)])
            each.step()
    original, copied = ([*net.parameters()] for net, *_ in runs)
    assert all(map(torch.equal, original, copied))


@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_layer_without_inputs_has_a_bias_alone(name: str) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(0, 4), nn.Tanh(), nn.Linear(4, CLASSES)))
    recorder = RECORDERS[name](model)
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=N, curvature=recorder)
    before = model[0].bias.detach().clone()
    record(recorder, model, [(normal(N, 0), labels(N, CLASSES))])
    optimizer.step()
    assert not torch.equal(model[0].bias, before)


@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_recorder_may_be_made_before_lazy_modules_have_shapes(name: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(CLASSES)).double()
    recorder = RECORDERS[name](model)
    model(normal(2, 3))
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=N, curvature=recorder)
    record(recorder, model, [(normal(N, 3), labels(N, CLASSES))])
    assert recorder.of(model[0].weight, batch_size=N) is not None
    optimizer.step()


@pytest.mark.parametrize("joint", [True, False])
def test_a_bias_of_several_weights_is_in_no_pair(joint: bool) -> None:
    """What comes through one of its layers is not its curvature: it keeps the outer product."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, CLASSES)))
    model[2].bias = model[0].bias
    recorder = KFACRecorder(model, joint=joint)
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=N, curvature=recorder)
    record(recorder, model, [(normal(N, 3), labels(N, CLASSES))])
    assert recorder.of(model[0].bias, batch_size=N) is None
    assert recorder.of(model[2].weight, batch_size=N).axes == (CLASSES, 3)
    optimizer.step()


@pytest.mark.parametrize("what", ["bias", "weight", "both"])
@pytest.mark.parametrize("trained_first", [True, False])
def test_what_is_frozen_or_trained_later_changes_no_pairs(what: str, trained_first: bool) -> None:
    """The optimizer knows from its start which weights and biases are one matrix."""
    model = network()
    changing = [p for name, p in model[4].named_parameters() if what in (name, "both")]
    for p in changing:
        p.requires_grad_(trained_first)
    recorder = KFACRecorder(model)
    optimizer = rootfree.IFShampoo(
        model.parameters(), batch_size=N, update_every=1, curvature=recorder
    )
    for trained in (trained_first, not trained_first):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in changing]
        for p in changing:
            p.requires_grad_(trained)
        record(recorder, model, [batch()])
        optimizer.step()
        moved = [not torch.equal(p, old) for p, old in zip(changing, before, strict=True)]
        assert all(moved) if trained else not any(moved)


@pytest.mark.parametrize("joint", [True, False])
def test_a_recording_that_is_not_finite_concerns_its_own_layer(joint: bool) -> None:
    """Layers of one form are looked at together, but only those that the optimizer has."""
    model = seeded(lambda: nn.Sequential(*[nn.Linear(CLASSES, CLASSES) for _ in range(3)]))
    recorder = KFACRecorder(model, joint=joint)
    words = {"batch_size": N, "curvature": recorder, "nonfinite": "raise"}
    others = [*model[0].named_parameters("0"), *model[2].named_parameters("2")]
    for params, refused in ((model.named_parameters(), True), (others, False)):
        optimizer = rootfree.IFShampoo(params, **words)
        before = values(model, optimizer) if refused else []
        record(recorder, model, [(normal(N, CLASSES), labels(N, CLASSES))])
        recorder._records[model[1].weight].G.view(-1)[0] = float("inf")
        if refused:
            with pytest.raises(FloatingPointError, match=r"curvature of parameter 1\.weight"):
                optimizer.step()
            assert_untouched(before, model, optimizer)
        else:
            optimizer.step()


@pytest.mark.parametrize("name", [name for name in RECORDERS if name != "hutchinson"])
def test_a_sum_that_is_said_to_be_an_average_is_refused(name: str) -> None:
    model = network()
    options = {} if "loss" in name or name.endswith(("sampled", "2")) else {"loss": "cross_entropy"}
    recorder = RECORDERS[name](model, **options)
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=N, curvature=recorder)
    before = values(model, optimizer)
    x, y = batch()
    with recorder:
        z = model(x)
        recorder.backward(nn.functional.cross_entropy(z, y, reduction="sum"), z)
    with pytest.raises(RuntimeError, match="says that the loss is an average"):
        optimizer.step()
    assert_untouched(before, model, optimizer)
    optimizer.batch_size = 1
    optimizer.step()  # the same recording, now with the right B


def test_a_sum_of_squares_that_is_said_to_be_an_average_is_refused() -> None:
    for loss, function in (
        ("mse", nn.functional.mse_loss),
        ("binary_cross_entropy", nn.functional.binary_cross_entropy_with_logits),
    ):
        model = network()
        recorder = MonteCarloFisherRecorder(model, loss=loss)
        y = torch.rand(N, CLASSES, dtype=torch.float64)
        for reduction, fine in (("mean", True), ("sum", False)):
            with recorder:
                z = model(batch()[0])
                recorder.backward(function(z, y, reduction=reduction), z)
            recorder._scale._trusted.clear()
            if fine:
                assert recorder.of(model[4].weight, batch_size=z.numel()) is not None
            else:
                with pytest.raises(RuntimeError, match="says that the loss is an average"):
                    recorder.of(model[4].weight, batch_size=z.numel())


def test_smoothed_labels_weights_and_regularisers_raise_no_false_alarm() -> None:
    model, (x, y) = network(), batch()
    recorder = KFACRecorder(model, loss="cross_entropy")
    for smoothing, extra in ((0.3, 0.0), (0.0, 2.0)):
        with recorder:
            z = model(x)
            loss = nn.functional.cross_entropy(z, y, label_smoothing=smoothing)
            recorder.backward(loss + extra * model[4].weight.square().sum(), z)
        recorder._scale._trusted.clear()
        assert recorder.of(model[4].weight, batch_size=N) is not None


def test_a_batch_size_that_is_not_the_number_of_terms_is_refused() -> None:
    model, (x, y) = network(), batch()
    recorder = KFACRecorder(model, fisher="monte-carlo", loss="cross_entropy")
    examples = PerExampleFisherRecorder(model)
    for each in (recorder, examples):
        record(each, model, [(x, y)])
    with pytest.raises(RuntimeError, match="the loss had 6 terms, but batch_size is 4"):
        recorder.of(model[4].weight, batch_size=4)
    with pytest.raises(RuntimeError, match="saw 6 examples, but batch_size is 4"):
        examples.of(model[4].weight, batch_size=4)


def test_other_misuse_is_refused() -> None:
    model, (x, y) = network(), batch()
    with pytest.raises(ValueError, match="fisher must be"):
        KFACRecorder(model, fisher="exact")
    with pytest.raises(ValueError, match="sharing must be"):
        KFACRecorder(model, sharing="sum")
    with pytest.raises(ValueError, match="needs to know the loss"):
        KFACRecorder(model, fisher="type-2")
    with pytest.raises(ValueError, match="loss must be one of"):
        KFACRecorder(model, loss="hinge")
    with pytest.raises(ValueError, match="samples"):
        MonteCarloFisherRecorder(model, loss="mse", samples=0)
    recorder = KFACRecorder(model, fisher="type-2", loss="cross_entropy")
    with recorder, pytest.raises(ValueError, match="needs the model's outputs"):
        recorder.backward(nn.functional.cross_entropy(model(x), y))
    with recorder, pytest.raises(RuntimeError, match="entered already"):
        recorder.__enter__()
    with pytest.raises(RuntimeError, match="outside its context"):
        recorder.backward(nn.functional.cross_entropy(model(x), y))
    record(recorder, model, [(x, y)])
    with pytest.raises(RuntimeError, match="none of the optimizer's parameters"):
        recorder.check([nn.Parameter(torch.ones(2))])


def test_inputs_changed_in_place_before_the_step_are_noticed() -> None:
    model, (x, y) = network(), batch()
    recorder = PerExampleFisherRecorder(model)
    record(recorder, model, [(x, y)])
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        recorder.of(model[0].weight, batch_size=N).V  # noqa: B018
