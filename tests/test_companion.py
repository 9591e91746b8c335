"""Groups that a matrix method leaves to AdamW: what they compute, check, save and refuse."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import rootfree
from conformance.problems import nothing_waits

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MATRIX = [rootfree.IFShampoo, rootfree.RFShampoo, rootfree.RFFullAdagrad, rootfree.IFFullAdagrad]
DIAGONAL = [rootfree.RFRMSprop, rootfree.RFAdagrad, rootfree.RFAdamW]
SHAPES = [(6, 4), (5,), (), (3, 2, 2)]


def parameters(dtype=torch.float32, shapes=SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def give_gradients(seed: int, *lists) -> None:
    """The same gradients for every list of parameters."""
    generator = torch.Generator().manual_seed(seed)
    for same in zip(*lists, strict=True):
        g = torch.randn(same[0].shape, generator=generator).to(same[0])
        for p in same:
            p.grad = g.clone()


def left_to_adamw(params, **options):
    return {"params": params, "companion": "adamw", **options}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("method", MATRIX)
def test_bit_identical_to_torchs(method, tensor_lr, dtype):
    """Beside a matrix of the method's own; torch has no foreach for tensors as lr on a CPU."""
    weight, *ours = parameters(dtype, [(4, 3), *SHAPES])
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    lr = torch.tensor(0.02) if tensor_lr else 0.02
    options = {"lr": lr, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    optimizer = method([{"params": [weight]}, left_to_adamw(ours, **options)], batch_size=4)
    adamw = torch.optim.AdamW(theirs, **options, foreach=None if tensor_lr else True)
    for t in range(4):
        give_gradients(t, ours, theirs)
        ours[1].grad = theirs[1].grad = None if t == 2 else ours[1].grad
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        adamw.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == adamw.state[q].keys()
        for key, tensor in adamw.state[q].items():
            assert torch.equal(optimizer.state[p][key], tensor)
            assert optimizer.state[p][key].dtype == tensor.dtype


@settings(deadline=None, max_examples=30)
@given(
    lr=st.floats(0, 1),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    eps=st.floats(1e-12, 1),
    weight_decay=st.floats(0, 10),
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4),
)
def test_any_options_and_shapes_give_what_torch_gives(lr, betas, eps, weight_decay, shapes):
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    ours = parameters(shapes=[tuple(s) for s in shapes])
    theirs = copy.deepcopy(ours)
    optimizer = rootfree.IFShampoo([left_to_adamw(ours, **options)])
    adamw = torch.optim.AdamW(theirs, **options, foreach=True)
    for t in range(3):
        give_gradients(t, ours, theirs)
        optimizer.step()
        adamw.step()
    assert all(map(torch.equal, ours, theirs))


def test_defaults_are_those_of_torch_but_the_decay_is_the_optimizers():
    (p,) = parameters(shapes=[(3,)])
    optimizer = rootfree.IFShampoo([left_to_adamw([p])], lr=0.5, weight_decay=0.25)
    (group,) = optimizer.param_groups
    torchs = torch.optim.AdamW([p]).defaults
    for name in ("lr", "betas", "eps"):
        assert group[name] == torchs[name]
    assert group["weight_decay"] == 0.25
    assert not {"precond_lr", "batch_size", "momentum"} & group.keys()


def test_gradients_of_another_layout_or_dtype():
    ours, theirs = (nn.Parameter(torch.ones(2, 3, 2, 2)) for _ in range(2))
    ours.data = ours.data.to(memory_format=torch.channels_last)
    ours.grad = torch.randn(2, 3, 2, 2)
    theirs.grad = ours.grad.clone()
    rootfree.IFShampoo([left_to_adamw([ours])]).step()
    torch.optim.AdamW([theirs], weight_decay=0.0, foreach=True).step()
    assert torch.equal(ours, theirs)


def test_batch_size_is_asked_for_by_matrices_alone():
    weight, vector = parameters(shapes=[(4, 3), (4,)])
    optimizer = rootfree.IFShampoo([{"params": [weight]}, left_to_adamw([vector])])
    before = vector.detach().clone()
    vector.grad = torch.ones(4)
    optimizer.step()  # the matrix has no gradient
    assert not torch.equal(vector, before)
    weight.grad = torch.ones(4, 3)
    with pytest.raises(RuntimeError, match="batch_size is not set"):
        optimizer.step()
    optimizer.batch_size = 8
    assert optimizer.batch_size == 8
    assert "batch_size" not in optimizer.param_groups[1]
    optimizer.step()
    assert rootfree.IFShampoo([left_to_adamw(parameters())]).batch_size is None


def test_the_batch_is_counted_for_the_matrices():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = rootfree.IFShampoo(rootfree.parameter_groups(model))
    with rootfree.track_batch_size(model, optimizer, "examples"):
        model(torch.randn(7, 4)).square().mean().backward()
        optimizer.step()
    assert optimizer.batch_size == 7


def test_refreshes_and_summary():
    weight, vector = parameters(shapes=[(4, 3), (4,)])
    groups = [{"params": [weight]}, left_to_adamw([vector], role="bias of the head")]
    optimizer = rootfree.IFShampoo(groups, batch_size=2, update_every=2)
    assert optimizer.refreshes_next
    give_gradients(0, [weight, vector])
    optimizer.step()
    assert not optimizer.refreshes_next
    optimizer.release()
    lines = optimizer.summary().splitlines()
    assert lines[0].split() == ["parameter", "shape", "role", "preconditioner", "state", "bytes"]
    assert lines[2].split() == ["1", "4", "bias", "of", "the", "head", "AdamW", "36"]
    alone = rootfree.IFShampoo([left_to_adamw(parameters())])
    assert not alone.refreshes_next
    assert "role" not in alone.summary()


# --- curvature ----------------------------------------------------------------------------------


def test_no_curvature_is_asked_for():
    asked = []

    class Curvature:
        def joint(self):
            return ()

        def check(self, params):
            asked.extend(params)

        def of(self, p, *, batch_size):
            asked.append(p)

        def used(self):
            pass

    weight, vector = parameters(shapes=[(4, 3), (4,)])
    groups = [{"params": [weight]}, left_to_adamw([vector])]
    optimizer = rootfree.IFShampoo(groups, batch_size=2, curvature=Curvature())
    give_gradients(0, [weight, vector])
    optimizer.step()
    assert [p is weight for p in asked] == [True, True]


def test_with_kfac():
    """A pair of weight and bias must stay together, unless the recorder takes them apart."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    groups = rootfree.parameter_groups(model)
    with pytest.raises(ValueError, match=r"same group \(KFACRecorder\(..., joint=False\)"):
        rootfree.IFShampoo(groups, batch_size=5, curvature=rootfree.KFACRecorder(model))
    recorder = rootfree.KFACRecorder(model, joint=False)
    groups = rootfree.parameter_groups(model)
    optimizer = rootfree.IFShampoo(groups, batch_size=5, curvature=recorder)
    pairs = [{"params": model[0].parameters()}, left_to_adamw(model[2].parameters())]
    joint = rootfree.KFACRecorder(model)
    together = rootfree.IFShampoo(pairs, batch_size=5, curvature=joint)
    for recording, each in ((recorder, optimizer), (joint, together)):
        before = [p.detach().clone() for p in model.parameters()]
        each.zero_grad()
        with recording:
            loss = nn.functional.cross_entropy(model(torch.randn(5, 4)), torch.arange(5) % 3)
            loss.backward()
        each.step()
        assert not any(map(torch.equal, before, model.parameters()))
    assert "(with its bias)" in together.summary().splitlines()[1]


# --- copies and checkpoints ---------------------------------------------------------------------


def two_kinds(**options):
    weight, vector = parameters(shapes=[(4, 3), (4,)])
    named = [{"params": [("body", weight)]}, left_to_adamw([("bias", vector)])]
    return rootfree.IFShampoo(named, **{"batch_size": 2, **options})


def of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_another_role_in_the_checkpoint_is_refused_by_name():
    optimizer, plain = (
        two_kinds(),
        rootfree.IFShampoo(
            [{"params": [p]} for p in parameters(shapes=[(4, 3), (4,)])], batch_size=2
        ),
    )
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"parameter bias of shape \(4,\) is updated by IFShampoo in the check.*"
    ):
        optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match=r"parameter 1 of shape \(4,\) is updated by AdamW in .*"):
        plain.load_state_dict(optimizer.state_dict())
    for key, row in optimizer.state_dict()["state"].items():
        assert all(torch.equal(tensor, before["state"][key][name]) for name, tensor in row.items())


def test_a_checkpoint_with_other_roles_names_a_parameter_that_has_one():
    """Other roles make other groups: what is said is the cause, not how many groups there are."""
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.Linear(8, 3))

    def grouped(**options):
        return rootfree.IFWhitening(rootfree.parameter_groups(model, **options))

    others = [
        (grouped(overrides={"1.weight": {"companion": "adamw"}}), r"1\.weight of shape \(8, 4\)"),
        (grouped(overrides={"0": {"companion": None}}), r"0\.weight of shape \(9, 4\)"),
        (rootfree.IFWhitening(model.named_parameters()), r"0\.weight of shape \(9, 4\)"),
    ]
    for other, what in others:
        for here, saved in ((other, grouped()), (grouped(), other)):
            with pytest.raises(ValueError, match=f"parameter {what} is updated by .* and by"):
                here.load_state_dict(saved.state_dict())
    nameless = rootfree.IFWhitening(model.parameters())
    with pytest.raises(ValueError, match=r"the checkpoint leaves 0\.weight to AdamW"):
        nameless.load_state_dict(grouped().state_dict())
    with pytest.raises(ValueError, match=r"the optimizer leaves 0\.weight to AdamW"):
        grouped().load_state_dict(nameless.state_dict())


@pytest.mark.parametrize("option", ["lr", "betas", "eps", "weight_decay"])
def test_a_bad_option_in_the_checkpoint_is_refused(option):
    saved = two_kinds().state_dict()
    saved["param_groups"][1][option] = -1.0
    with pytest.raises((ValueError, TypeError), match=option):
        two_kinds().load_state_dict(saved)


def test_checkpoints_and_pickles_from_before_there_were_companions():
    (p,) = parameters(shapes=[(4, 3)])
    optimizer = rootfree.IFShampoo([{"params": [p], "companion": None}], batch_size=2)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["companion"]
    optimizer.load_state_dict(saved)
    del optimizer.param_groups[0]["companion"]
    read = pickle.loads(pickle.dumps(optimizer))
    give_gradients(0, of(read))
    read.step()
    assert not torch.equal(of(read)[0], p)


def test_state_by_hand():
    """Cleared, or moved between the kinds: what is missing starts anew, what is left over goes."""
    optimizer = two_kinds()
    weight, vector = of(optimizer)
    give_gradients(0, [weight, vector])
    optimizer.step()
    keys = {p: set(optimizer.state[p]) for p in (weight, vector)}
    optimizer.state.clear()
    optimizer.step()
    assert {p: set(optimizer.state[p]) for p in (weight, vector)} == keys
    assert optimizer.state[vector]["step"] == 1
    one, other = optimizer.param_groups
    one["params"], other["params"] = other["params"], one["params"]
    optimizer.step()
    assert set(optimizer.state[weight]) == {"exp_avg", "exp_avg_sq", "step"}
    assert not {"exp_avg", "exp_avg_sq"} & set(optimizer.state[vector])
    assert optimizer.state[weight]["step"] == optimizer.state[vector]["step"] == 2


def test_capturable_keeps_lr_as_a_tensor():
    optimizer = two_kinds(capturable=True)
    give_gradients(0, of(optimizer))
    for group in optimizer.param_groups:
        assert isinstance(group["lr"], torch.Tensor)
        group["lr"].zero_()
    before = [p.detach().clone() for p in of(optimizer)]
    optimizer.step()
    assert all(map(torch.equal, before, of(optimizer)))


# --- on a GPU -----------------------------------------------------------------------------------


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("fused", [None, False])
def test_on_cuda_bit_identical_to_torchs_and_nothing_waits(fused, tensor_lr, dtype):
    ours = [nn.Parameter(p.detach().cuda()) for p in parameters(dtype)]
    theirs = copy.deepcopy(ours)
    lr = torch.tensor(0.02, device="cuda") if tensor_lr else 0.02
    optimizer = rootfree.IFShampoo([left_to_adamw(ours, lr=lr, weight_decay=0.1)], fused=fused)
    way = {"fused": True} if fused is None else {"foreach": True, "capturable": True}
    adamw = torch.optim.AdamW(theirs, lr=lr, weight_decay=0.1, **way)
    for t in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        with nothing_waits() if t else nullcontext():  # the first step lays things out
            optimizer.step()
        adamw.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        for key, tensor in adamw.state[q].items():
            assert torch.equal(optimizer.state[p][key], tensor)
            assert optimizer.state[p][key].is_cuda


@needs_cuda
@pytest.mark.parametrize("fused", [None, False])
def test_graphed_steps_are_the_eager_ones(fused):
    """Replayed, with a step size that a schedule changes at every step."""
    trajectories = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).cuda()
        groups = rootfree.parameter_groups(model)
        optimizer = rootfree.IFShampoo(groups, batch_size=16, capturable=True, fused=fused)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
        runner = rootfree.GraphedStep(optimizer) if graphed else optimizer
        for _ in range(10):
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(16, 32, device="cuda")).square().mean().backward()
            runner.step()
            schedule.step()
        if graphed:
            assert runner._recordings._recorded
            runner.release()
        rows = optimizer.state_dict()["state"].values()
        trajectories.append([*model.parameters(), *(t for row in rows for t in row.values())])
    assert all(map(torch.equal, *trajectories))


@needs_cuda
def test_the_count_of_steps_follows_the_model():
    (p,) = parameters(shapes=[(4,)])
    optimizer = rootfree.IFShampoo([left_to_adamw([p])])
    for device in ("cpu", "cuda", "cpu"):
        p.data, p.grad = p.data.to(device), torch.ones(4, device=device)
        optimizer.step()
        assert {t.device.type for t in optimizer.state[p].values()} == {device}
    assert optimizer.state[p]["step"] == 3


# --- what is refused ----------------------------------------------------------------------------

BAD = {
    "companion": ["adam", "AdamW", True, 3],
    "lr": [-1e-3, float("nan"), None, "0.1"],
    "betas": [0.9, (0.9, 1.0), (-0.1, 0.9), None],
    "eps": [-1e-8, float("inf"), None],
    "weight_decay": [-0.1, "0", None],
}


@pytest.mark.parametrize("method", MATRIX)
def test_bad_options_name_the_argument(method):
    (p,) = parameters(shapes=[(4,)])
    optimizer = method([parameters(shapes=[(2, 2)])[0]], batch_size=2)
    for option, values in BAD.items():
        for value in values:
            with pytest.raises((ValueError, TypeError), match=f"^{option}.* must be"):
                optimizer.add_param_group({**left_to_adamw([p]), option: value})
    for option in set(method.options) - {"lr", "weight_decay", "maximize"}:
        with pytest.raises(ValueError, match=rf"^{option} must not be given in a group with .*eps"):
            optimizer.add_param_group(left_to_adamw([p], **{option: optimizer.defaults[option]}))
    with pytest.raises(ValueError, match="no option 'beta'; did you mean 'betas'"):
        optimizer.add_param_group(left_to_adamw([p], beta=0.9))
    with pytest.raises(ValueError, match="no option 'compagnion'; did you mean 'companion'"):
        optimizer.add_param_group({"params": [p], "compagnion": "adamw"})
    with pytest.raises(ValueError, match="given twice"):
        optimizer.add_param_group(left_to_adamw([p, p]))
    assert (len(optimizer.param_groups), p in optimizer.state) == (1, False)
    optimizer.add_param_group(left_to_adamw([p], initial_lr=0.1))
    optimizer.add_param_group({**optimizer.param_groups[1], "params": parameters()})


@pytest.mark.parametrize("method", DIAGONAL)
def test_diagonal_methods_have_no_companion(method):
    with pytest.raises(ValueError, match=rf"^companion must be None in {method.__name__}, got 'ad"):
        method([left_to_adamw(parameters())], batch_size=2)
    method([{"params": parameters(), "companion": None}], batch_size=2)


@pytest.mark.parametrize(("group", "companion"), [(0, "adamw"), (1, None)])
def test_the_companion_of_a_group_must_stay(group, companion):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = rootfree.IFWhitening(rootfree.parameter_groups(model))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = {p: (p.detach().clone(), dict(state)) for p, state in optimizer.state.items()}
    optimizer.param_groups[group]["companion"] = companion
    with pytest.raises(ValueError, match=f"companion must stay .* got {companion!r}"):
        optimizer.step()
    for p, (value, state) in before.items():
        assert torch.equal(p, value)
        assert all(optimizer.state[p][key] is tensor for key, tensor in state.items())
