"""Parameters of every kind: missing gradients, late groups, dtypes, layouts, odd shapes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformance.problems import batches, identical, loss_of, network, snapshot, train


def with_gradients(*tensors: torch.Tensor, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(t) for t in tensors]
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
    return parameters


def test_no_gradients_at_all_changes_nothing(row):
    optimizer = row.make(network().parameters())
    before = snapshot(optimizer)
    optimizer.step()
    assert identical(before, snapshot(optimizer))


def test_parameters_without_gradient_are_left_alone(row):
    model = network()
    optimizer = row.make(model.parameters())
    loss_of(model, *next(iter(batches(1)))).backward()
    ps = list(model.parameters())
    ps[0].grad = None
    ps[4].grad = None
    before = [p.detach().clone() for p in ps]
    state_before = [{k: t.clone() for k, t in optimizer.state[p].items()} for p in ps]
    optimizer.step()
    for i, p in enumerate(ps):
        assert torch.equal(p, before[i]) == (i in (0, 4))
        if i in (0, 4):
            for key, tensor in optimizer.state[p].items():
                assert torch.equal(tensor, state_before[i][key])


def test_the_others_do_not_notice_a_missing_gradient(row):
    """A parameter's update is the same whether its neighbours have gradients or not."""
    model, other = network(), network()
    optimizer, partial = row.make(model.parameters()), row.make(other.parameters())
    for m in (model, other):
        loss_of(m, *next(iter(batches(1)))).backward()
    other[0].weight.grad = None
    optimizer.step()
    partial.step()
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q) == (name != "0.weight"), name


def test_frozen_parameters(row):
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    train(model, row.make(model.parameters()), batches(3))
    assert torch.equal(model[0].weight, before)


def test_late_groups_equal_groups_from_the_start(row):
    model, other = network(), network()
    late = row.make(model[0].parameters())
    rest = [p for i in (1, 4, 6) for p in model[i].parameters()]
    late.add_param_group({"params": iter(rest), "lr": 0.001})
    split = row.make(
        [
            {"params": other[0].parameters()},
            {"params": [p for i in (1, 4, 6) for p in other[i].parameters()], "lr": 0.001},
        ]
    )
    train(model, late, batches(4))
    train(other, split, batches(4))
    assert identical(snapshot(late), snapshot(split))
    assert [group["lr"] for group in late.param_groups] == [row.settings["lr"], 0.001]


def test_group_overrides_are_used(row):
    model = network()
    optimizer = row.make(
        [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[4].parameters()}]
    )
    frozen, moving = model[0].weight.clone(), model[4].weight.clone()
    train(model, optimizer, batches(2))
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[4].weight, moving)


def test_named_parameters(row):
    model, other = network(), network()
    named, plain = row.make(model.named_parameters()), row.make(other.parameters())
    train(model, named, batches(2))
    train(other, plain, batches(2))
    assert identical(snapshot(named), snapshot(plain))
    assert named.param_groups[0]["param_names"][0] == "0.weight"
    assert "0.weight" in named.summary()


def on_their_devices(optimizer) -> bool:
    """Whether all state is where its parameter is; steps of meta tensors are counted on the CPU."""
    return all(
        t.device.type == ("cpu" if key == "step" and p.is_meta else p.device.type)
        for p, state in optimizer.state.items()
        for key, t in state.items()
    )


def test_state_follows_a_moved_model_also_where_gradients_are_missing(row):
    """No tensors that were left behind are stacked with others, or handed to their kernel."""
    ps = [nn.Parameter(torch.zeros(4, 4, device="meta")) for _ in range(2)]
    optimizer = row.make(ps)
    # As if the parameters had been on the CPU when the optimizer was made.
    for state in optimizer.state.values():
        state.update({key: torch.zeros_like(t, device="cpu") for key, t in state.items()})
    for p in ps:
        p.grad = torch.zeros_like(p)
        optimizer.step()
        assert on_their_devices(optimizer)


def test_state_follows_a_part_of_a_model_that_is_moved(row):
    """The others of its list, which it comes after, are where they should be."""
    ps = [nn.Parameter(torch.zeros(4, 4, device="meta")) for _ in range(2)]
    optimizer = row.make(ps)
    last = optimizer.state[ps[1]]
    last.update({key: torch.zeros_like(t, device="cpu") for key, t in last.items()})
    for p in ps:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert on_their_devices(optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parameter_dtypes(row, dtype):
    """Half-precision parameters follow the float32 ones within their own precision."""
    (p,) = with_gradients(torch.linspace(-1, 1, 12).view(3, 4).to(dtype))
    (reference,) = with_gradients(p.detach().float())
    reference.grad = p.grad.float()
    optimizer, in_float32 = row.make([p]), row.make([reference])
    optimizer.step()
    in_float32.step()
    assert p.dtype == dtype
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    if "bf16" in row.name:
        eps = max(eps, torch.finfo(torch.bfloat16).eps)  # float64 keeps another low-order part
    torch.testing.assert_close(p.float(), reference, rtol=4 * eps, atol=4 * eps)
    if row.settings.get("state_dtype") is None:
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        floats = [t for t in optimizer.state[p].values() if t.is_floating_point()]
        assert {t.dtype for t in floats} == {expected}


def test_mixed_dtypes_equal_separate_optimizers(row):
    values = [torch.ones(3, 2), torch.ones(4).bfloat16(), torch.ones(2, 2, 2).double()]
    mixed = with_gradients(*(v.clone() for v in values))
    row.make(mixed).step()
    for i, v in enumerate(values):
        (alone,) = with_gradients(v.clone())
        alone.grad = mixed[i].grad.clone()
        row.make([alone]).step()
        # noise of stochastic rounding depends on the place in the optimizer, nothing else does
        torch.testing.assert_close(mixed[i], alone, rtol=2**-7 if "bf16" in row.name else 0, atol=0)


def test_channels_last_equals_contiguous(row):
    weights = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    contiguous, last = with_gradients(
        weights.clone(), weights.clone().to(memory_format=torch.channels_last)
    )
    last.grad = contiguous.grad.clone()  # the gradient's layout may differ from the parameter's
    assert not last.is_contiguous()
    for p in (contiguous, last):
        optimizer = row.make([p])
        optimizer.step()
        optimizer.step()
    torch.testing.assert_close(contiguous, last, rtol=1e-5, atol=1e-6)
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_scalar_empty_and_singleton_parameters(row):
    scalar, empty, singleton, vector = with_gradients(
        torch.tensor(1.0), torch.ones(0, 3), torch.ones(1, 1, 1), torch.ones(5)
    )
    optimizer = row.make([scalar, empty, singleton, vector])
    for _ in range(3):
        optimizer.step()
    assert scalar.shape == ()
    assert empty.shape == (0, 3)
    for p in (scalar, singleton, vector):
        assert torch.isfinite(p).all()
        assert (p != 1).all()


def test_zero_gradients_keep_everything_finite(row):
    p = nn.Parameter(torch.ones(4, 3))
    optimizer = row.make([p], weight_decay=0.0)
    for _ in range(30):
        p.grad = torch.zeros(4, 3)
        optimizer.step()
    assert torch.equal(p, torch.ones(4, 3))
    assert all(torch.isfinite(t).all() for t in snapshot(optimizer))


def test_state_is_plain_and_eager(row):
    """Flat tensors before any step; groups of plain values: what safe loading and DCP need."""
    model = network()
    optimizer = row.make(model.parameters())
    keys = {p: set(optimizer.state[p]) for p in model.parameters()}
    plain = (int, float, str, bool, torch.dtype, type(None))

    def is_plain(value):
        return all(map(is_plain, value)) if type(value) is tuple else isinstance(value, plain)

    for p in model.parameters():
        assert keys[p]
        assert all(isinstance(t, torch.Tensor) for t in optimizer.state[p].values())
    for name, value in optimizer.param_groups[0].items():
        if name != "params":
            assert is_plain(value), name
    train(model, optimizer, batches(2))
    assert keys == {p: set(optimizer.state[p]) for p in model.parameters()}


def test_summary_lists_every_parameter_and_its_bytes(row):
    model = network()
    optimizer = row.make(model.parameters())
    lines = optimizer.summary().splitlines()
    assert len(lines) == len(list(model.parameters())) + 2
    assert lines[0].split() == ["parameter", "shape", "preconditioner", "state", "bytes"]
    held = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    assert lines[-1].split()[-1] == f"{held:,}"
    assert "4x1x3x3" in lines[1]


def test_portions_change_nothing(row, monkeypatch):
    """On a CPU the diagonal methods update a few parameters at a time; the result is the same."""
    results = []
    for portion in (None, 10):
        monkeypatch.setattr(row.optimizer, "_elements_at_once", portion)
        model = network()
        optimizer = row.make(model.parameters())
        train(model, optimizer, batches(3))
        results.append(snapshot(optimizer))
    assert identical(*results)
