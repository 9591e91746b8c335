"""What stands around an optimizer in a training loop keeps working."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from conformance.problems import (
    BATCH,
    batches,
    identical,
    loss_of,
    network,
    snapshot,
    train,
)
from conformance.rows import ROWS

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=8),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
}


#: Every scheduler on one method of each kind; on every row the one that sets most.
SCHEDULED = [
    (row, name)
    for row in ROWS
    for name in SCHEDULERS
    if name == "one_cycle" or row.name in ("RFAdamW", "IFShampoo")
]


@pytest.mark.parametrize(
    ("row", "scheduler"), SCHEDULED, ids=[f"{row.name}-{name}" for row, name in SCHEDULED]
)
def test_schedulers_set_the_step_size(row, scheduler):
    """Training under a scheduler equals setting by hand what the scheduler sets."""
    model, by_hand = network(), network()
    optimizer, optimizer_by_hand = row.make(model.parameters()), row.make(by_hand.parameters())
    schedule = SCHEDULERS[scheduler](optimizer)
    seen = set()
    for x, y in batches(6):
        for name in ("lr", "momentum", "betas"):
            if name in optimizer.defaults:
                optimizer_by_hand.param_groups[0][name] = optimizer.param_groups[0][name]
        seen.add(optimizer.param_groups[0]["lr"])
        for m, o in ((model, optimizer), (by_hand, optimizer_by_hand)):
            o.zero_grad()
            loss_of(m, x, y).backward()
            o.step()
        schedule.step()
    assert len(seen) > 1
    assert identical(snapshot(optimizer), snapshot(optimizer_by_hand))


@pytest.mark.parametrize(
    "row", [r for r in ROWS if "momentum" in r.optimizer.options], ids=lambda r: r.name
)
def test_momentum_turned_on_by_a_scheduler_is_used(row):
    model, without = network(), network()
    optimizer = row.make(model.parameters(), momentum=0.0)
    plain = row.make(without.parameters(), momentum=0.0)
    optimizer.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, batches(3))
    train(without, plain, batches(3))
    assert not identical([*model.parameters()], [*without.parameters()])


def test_tensor_lr_equals_number(row):
    model, other = network(), network()
    optimizer = row.make(model.parameters(), lr=0.01)
    lr = torch.tensor(0.01)
    with_tensor = row.make(other.parameters(), lr=lr)
    train(model, optimizer, batches(5))
    train(other, with_tensor, batches(5))
    assert with_tensor.param_groups[0]["lr"] is lr
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
    lr.zero_()  # the tensor itself is the step size: changing it in place stops the parameters
    before = [q.detach().clone() for q in other.parameters()]
    train(other, with_tensor, batches(1))
    assert identical(before, [*other.parameters()])


def test_closure_returns_the_loss_and_equals_the_plain_loop(row):
    model, other = network(), network()
    optimizer, plain = row.make(model.parameters()), row.make(other.parameters())
    for x, y in batches(3):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        returned = optimizer.step(closure)
        assert returned.item() == train(other, plain, [(x, y)])[0]
    assert identical(snapshot(optimizer), snapshot(plain))
    assert plain.step() is None


def test_accumulated_gradients_equal_one_large_batch(row):
    """Two averaged half batches, each loss halved, with the B of the whole."""

    def model_without_batch_statistics():
        model = network(torch.float64)
        model[1].eval()
        return model

    whole, halves = model_without_batch_statistics(), model_without_batch_statistics()
    optimizer, accumulating = row.make(whole.parameters()), row.make(halves.parameters())
    for x, y in batches(3, torch.float64):
        optimizer.zero_grad()
        loss_of(whole, x, y).backward()
        optimizer.step()
        accumulating.zero_grad()
        for part in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
            (loss_of(halves, x[part], y[part]) / 2).backward()
        accumulating.step()
    for p, q in zip(whole.parameters(), halves.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(row, dtype):
    model = network()
    optimizer = row.make(model.parameters())
    losses = []
    for x, y in batches(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < sum(losses[:5])


def test_a_step_inside_autocast_is_the_same(row):
    """The products of a step have the dtypes that its options say."""
    if row.name.endswith("-kronecker"):
        pytest.skip("this curvature multiplies matrices itself when it is asked: in bfloat16 there")
    found = []
    for inside in (True, False):
        model = network()
        optimizer = row.make(model.parameters())
        for x, y in batches(3):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                optimizer.step()
        found.append(snapshot(optimizer))
    assert identical(*found)


def test_gradient_scaler(row):
    """Scaled training equals unscaled training (a power of two is exact), inf skips the step."""
    model, other = network(), network()
    optimizer, plain = row.make(model.parameters()), row.make(other.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in batches(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
    train(other, plain, batches(4))
    assert identical(snapshot(optimizer), snapshot(plain))
    next(model.parameters()).grad.fill_(float("inf"))
    before = snapshot(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert identical(before, snapshot(optimizer))


def test_gradient_clipping_is_seen(row):
    model, other = network(), network()
    optimizer, plain = row.make(model.parameters()), row.make(other.parameters())
    for x, y in batches(2):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    train(other, plain, batches(2))
    assert not identical([*model.parameters()], [*other.parameters()])
    assert all(torch.isfinite(t).all() for t in snapshot(optimizer))


def test_gradients_are_never_modified(row):
    model = network()
    optimizer = row.make(model.parameters())
    for x, y in batches(3):
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert identical(gradients, [p.grad for p in model.parameters()])


def test_zero_grad(row):
    model = network()
    optimizer = row.make(model.parameters())
    loss_of(model, *next(iter(batches(1)))).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad.count_nonzero() == 0 for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_step_hooks(row):
    model = network()
    optimizer = row.make(model.parameters())
    calls = []
    before = optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("pre"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("post"))
    train(model, optimizer, batches(1))
    before.remove()
    train(model, optimizer, batches(1))
    assert calls == ["pre", "post", "post"]


def test_state_is_where_the_parameters_are_and_counts_on_the_host(row):
    """Whatever device new tensors have by default."""
    trained = []
    for default in ("cpu", "meta"):
        model, data = network(), [*batches(4)]
        with torch.device(default):
            optimizer = row.make(model.parameters())
        for x, y in data:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            with torch.device(default):
                optimizer.step()
                optimizer.load_state_dict(optimizer.state_dict())
                if hasattr(optimizer, "diagnostics"):
                    optimizer.diagnostics()
        trained.append(snapshot(optimizer))
    assert identical(*trained)


KINDS = dict.fromkeys(row.optimizer for row in ROWS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_profiler_names(kind):
    row = next(row for row in ROWS if row.optimizer is kind)
    model = network()
    optimizer = row.make(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(model, optimizer, batches(1))
    names = {event.key for event in profile.key_averages()}
    name = kind.__name__
    assert {f"Optimizer.step#{name}.step", f"Optimizer.zero_grad#{name}.zero_grad"} <= names
