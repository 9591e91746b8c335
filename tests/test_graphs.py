"""Steps from CUDA graphs: the eager trajectory bit for bit; `capturable` and errors anywhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import rootfree
from conformance.problems import BATCH, batches, identical, loss_of, network, snapshot
from kernels.devices import DEVICE
from rootfree.kernels.fused_stack import FusedStack
from rootfree.shell.gradients import find_work

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# -- anywhere --------------------------------------------------------------------------------


def test_the_optimizer_must_be_one_of_ours():
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="must be one of rootfree's, got SGD"):
        rootfree.GraphedStep(other)


def test_parameters_must_be_on_a_gpu():
    optimizer = rootfree.RFRMSprop(network().parameters(), batch_size=BATCH)
    with pytest.raises(ValueError, match="on one CUDA device, got cpu"):
        rootfree.GraphedStep(optimizer)


@pytest.mark.parametrize("make", [rootfree.RFRMSprop, rootfree.RFAdamW, rootfree.IFShampoo])
def test_capturable_keeps_the_step_size_as_a_tensor_that_schedulers_change(make):
    models = [network() for _ in range(2)]
    optimizers = [
        make(m.parameters(), lr=0.02, batch_size=BATCH, capturable=capturable)
        for m, capturable in zip(models, (True, False), strict=True)
    ]
    lr = optimizers[0].param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in optimizers]
    for x, y in batches(5):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            scheduler.step()
    assert optimizers[0].param_groups[0]["lr"] is lr
    torch.testing.assert_close(lr.item(), optimizers[1].param_groups[0]["lr"])
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_leaves_the_tensor_where_it_is():
    first, second = (
        rootfree.RFRMSprop(network().parameters(), lr=lr, batch_size=BATCH, capturable=True)
        for lr in (0.5, 0.25)
    )
    lr = second.param_groups[0]["lr"]
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.param_groups[0]["lr"] is lr
    assert lr.item() == 0.5
    lr.fill_(0.125)
    assert first.param_groups[0]["lr"].item() == 0.5


def test_groups_of_a_capturable_optimizer_have_tensors_of_their_own():
    ps = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = rootfree.RFRMSprop(
        [{"params": ps[:1]}, {"params": ps[1:], "lr": 0.5}], batch_size=1, capturable=True
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [isinstance(lr, torch.Tensor) for lr in rates] == [True, True]
    assert rates[0] is not rates[1]


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (rootfree.RFShampoo, {}, "factorises with Cholesky"),
        (rootfree.RFFullAdagrad, {"damping": 0.1}, "with damping it factorises with Cholesky"),
        (rootfree.RFFullAdagrad, {}, None),
        (rootfree.IFFullAdagrad, {"damping": 0.1}, None),
        (rootfree.IFShampoo, {}, None),
        (rootfree.RFRMSprop, {}, None),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_methods_that_wait_for_the_device_say_why(make, options, reason):
    optimizer = make(network().parameters(), batch_size=BATCH, **options)
    why = optimizer._why_not_recordable()
    assert why is None if reason is None else reason in why


def test_damping_that_is_turned_on_later_is_seen():
    ps = list(network().parameters())
    groups = [{"params": ps[:2]}, {"params": ps[2:]}]
    optimizer = rootfree.RFFullAdagrad(groups, batch_size=BATCH)
    assert optimizer._why_not_recordable() is None
    optimizer.param_groups[1]["damping"] = 0.1
    assert "Cholesky" in optimizer._why_not_recordable()


@pytest.mark.parametrize("make", [rootfree.IFShampoo, rootfree.RFFullAdagrad])
def test_ranks_that_share_blocks_are_a_reason_in_every_method(make):
    ps = list(network().parameters())
    optimizer = make(ps, batch_size=BATCH)
    optimizer._placing.homes[ps[0]] = "shared with another rank"
    assert "exchange blocks" in optimizer._why_not_recordable()


def kind_of(optimizer):
    """What a GraphedStep tells steps apart by, without a GPU."""
    graphed = object.__new__(rootfree.GraphedStep)
    graphed._optimizer = optimizer
    return graphed._kind(find_work(optimizer))[0]


NUMBERS = {
    "lr": 0.5,
    "momentum": 0.5,
    "weight_decay": 0.3,
    "precond_lr": 0.2,
    "damping": 0.3,
    "batch_size": 7,
}


def stepped(make, *, missing=(), optimizer=None, **options):
    """An optimizer after two steps (the first makes what the second knows)."""
    if optimizer is None:
        start = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "damping": 0.1}
        shapes = [(4, 3), *[(5,)] * 5]
        ps = [nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in shapes]
        optimizer = make(ps, batch_size=8, **{**start, **options})
    ps = optimizer.param_groups[0]["params"]
    for _ in range(2):
        for i, p in enumerate(ps):
            p.grad = None if i in missing else torch.ones_like(p)
        optimizer.step()
    for i, p in enumerate(ps):
        p.grad = None if i in missing else torch.ones_like(p)
    return optimizer


BF16_PRODUCTS = {"matmul_dtype": torch.bfloat16}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    ("make", "options"),
    [(rootfree.RFRMSprop, {}), (rootfree.IFShampoo, BF16_PRODUCTS)],
    ids=["RFRMSprop", "IFShampoo"],
)
def test_with_kernels_numbers_are_no_part_of_a_recording(make, options, name):
    """But whether they are zero is, and without kernels all of them are."""
    optimizer = stepped(make, fused=True, **options)
    group, before = optimizer.param_groups[0], kind_of(optimizer)
    group[name] = NUMBERS[name]
    assert kind_of(optimizer) == before
    if name == "weight_decay":
        group[name] = 0.0
        assert kind_of(optimizer) != before
    optimizer = stepped(make, fused=False, **options)
    before = kind_of(optimizer)
    optimizer.param_groups[0][name] = NUMBERS[name]
    assert kind_of(optimizer) != before


def whitening(ps, batch_size, **options):
    return rootfree.IFWhitening(ps, **options)


def test_with_kernels_a_start_is_no_part_of_a_recording():
    """Its numbers are sent before each replay; without kernels every step of it is of a kind."""
    optimizer = stepped(whitening, fused=True, **BF16_PRODUCTS)
    before = kind_of(optimizer)
    assert kind_of(stepped(whitening, optimizer=optimizer)) == before
    (work,) = find_work(optimizer)
    optimizer._send_numbers(work)
    sent = work.stacks[0][1].numbers.tensor
    assert sent[6].item() == pytest.approx(1 - (4 / 54) ** 2)  # β₂ of a refresh for two steps
    optimizer = stepped(whitening, fused=False)
    before = kind_of(optimizer)
    assert kind_of(stepped(whitening, optimizer=optimizer)) != before
    optimizer.param_groups[0]["fast_start"] = False
    before = kind_of(optimizer)
    assert kind_of(stepped(whitening, optimizer=optimizer)) == before


def test_a_graph_that_others_replay_has_no_start(monkeypatch):
    """Its numbers would stay those of the step that was recorded."""
    optimizer = stepped(whitening)
    (group,) = optimizer.param_groups
    assert optimizer._settings(group, 0)["precond_lr"] == pytest.approx(50 / 52)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert optimizer._settings(group, 0) is not group, "nothing here is on a GPU"
    memory = optimizer._memories[id(group)]
    monkeypatch.setattr(memory, "places", [(torch.device("cuda"), *memory.places[0][1:])])
    assert optimizer._settings(group, 0) is group
    optimizer._replayed_here = True  # by a GraphedStep, which sends them before each replay
    assert optimizer._settings(group, 0)["precond_lr"] == pytest.approx(50 / 52)


@pytest.mark.parametrize(
    ("name", "value"),
    [("nesterov", False), ("max_update", 0.1), ("update_rms", 0.2), ("max_update_rms", None)],
)
def test_what_a_graph_does_is_part_of_its_kind(name, value):
    optimizer = stepped(rootfree.IFShampoo, fused=True, **BF16_PRODUCTS)
    before = kind_of(optimizer)
    optimizer.param_groups[0][name] = value
    assert kind_of(optimizer) != before
    if value:  # its size is a number
        again = kind_of(optimizer)
        optimizer.param_groups[0][name] = value if value is True else 2 * value
        assert kind_of(optimizer) == again


@pytest.mark.parametrize(
    ("make", "options"),
    [(rootfree.RFRMSprop, {}), (rootfree.IFShampoo, BF16_PRODUCTS)],
    ids=["RFRMSprop", "IFShampoo"],
)
def test_steps_with_other_tables_are_of_another_kind(make, options):
    """A graph reads the numbers of the tables that it was recorded with.

    Only a few patterns of missing gradients are remembered; one that comes again later has new
    tables, and numbers are sent there.
    """
    optimizer = stepped(make, fused=True, **options)
    before, (work,) = kind_of(optimizer), find_work(optimizer)
    tables = [work.kernel, *[stack for _, stack in work.stacks or []]]
    assert any(isinstance(table, FusedStack) for table in tables) == (work.kernel is None)
    for missing in range(1, 6):
        stepped(make, optimizer=optimizer, missing=[missing])
        stepped(make, optimizer=optimizer, missing=[missing])
    # All but the first missed four steps: they refresh together again.
    stepped(make, optimizer=optimizer)
    (again,) = find_work(optimizer)
    mine = [again.kernel, *[stack for _, stack in again.stacks or []]]
    assert all(old is not new or old is None for old, new in zip(tables, mine, strict=True))
    assert kind_of(optimizer) != before


# -- on a GPU --------------------------------------------------------------------------------


def resnet_like() -> nn.Module:
    """Convolutions with three axes after merging, 1×1 ones, norms, and a linear layer."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32).eval(),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(48, 32, 1),
        nn.Flatten(),
        nn.Linear(512, 3),
    ).cuda()


MODELS = {"resnet": resnet_like, "linear": lambda: network().cuda()}
BF16 = {"state_dtype": torch.bfloat16}
RULES = {"fused": False}
METHODS = {
    "RFRMSprop": (rootfree.RFRMSprop, {}),
    "RFRMSprop-bf16": (rootfree.RFRMSprop, BF16),
    "RFRMSprop-rules": (rootfree.RFRMSprop, RULES),
    "RFAdamW": (rootfree.RFAdamW, {}),
    "IFShampoo": (rootfree.IFShampoo, {"block_size": 64}),
    "IFShampoo-rules": (rootfree.IFShampoo, {"block_size": 64, **RULES}),
    "IFShampoo-low-memory": (rootfree.IFShampoo, {"factor_dtype": torch.bfloat16, **BF16}),
    "IFShampoo-rms": (
        rootfree.IFShampoo,
        {"block_size": 64, "update_rms": 0.2, "nesterov": True, "weight_decay": 0.1},
    ),
    # Directions by rules between kernels.
    "IFShampoo-fp32": (rootfree.IFShampoo, {"block_size": 64, "matmul_dtype": torch.float32}),
    "IFWhitening": (whitening, {"block_size": 64}),
    "IFWhitening-rules": (whitening, {"block_size": 64, **RULES}),
    "IFFullAdagrad": (rootfree.IFFullAdagrad, {"block_size": 64, "update_every": 2}),
    "RFFullAdagrad": (rootfree.RFFullAdagrad, {"block_size": 64, "update_every": 2}),
}
STEPS = 10


class Run:
    """A model with its optimizer; `graphed` is None for steps as usual."""

    def __init__(self, method, model="linear", *, graphed, **options):
        self.model = MODELS[model]()
        make, settings = METHODS[method]
        options = {"lr": 0.01, "batch_size": BATCH, **settings, **options}
        self.optimizer = make(self.model.parameters(), **options)
        self.graphed = rootfree.GraphedStep(self.optimizer) if graphed else None

    def backward(self, x, y, *, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)
        loss_of(self.model, x.cuda(), y.cuda()).backward()

    def step(self):
        (self.graphed or self.optimizer).step()

    @property
    def recorded(self) -> int:
        return len(self.graphed._recordings._recorded)


def compare(method, model="linear", *, steps=STEPS, change=None, graphs=None, **options):
    """Both runs, given the same gradients; `change(run, i)` comes before the step."""
    set_to_none = options.pop("set_to_none", True)
    runs = [Run(method, model, graphed=graphed, **options) for graphed in (True, False)]
    for i, (x, y) in enumerate(batches(steps)):
        runs[1].backward(x, y, set_to_none=set_to_none)
        runs[0].optimizer.zero_grad(set_to_none)
        pairs = zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True)
        for p, q in pairs:
            if p.grad is None:
                p.grad = q.grad.clone()
            else:
                p.grad.copy_(q.grad)
        for run in runs:
            if change is not None:
                change(run, i)
            run.step()
        assert identical(*(snapshot(run.optimizer) for run in runs)), f"step {i}"
    if graphs is not None:
        assert runs[0].recorded == graphs
    return runs


@needs_cuda
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_eager_trajectory_bit_for_bit(method, model, set_to_none):
    graphs = 1 if method.startswith(("RFRMSprop", "RFAdamW")) else 2  # with and without a refresh
    if method == "IFWhitening-rules":
        graphs = None  # each step of its start is recorded anew
    compare(method, model, set_to_none=set_to_none, graphs=graphs)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "IFShampoo"])
def test_gradients_with_their_sign_turned(method):
    """They are turned in the graph, from wherever they are now."""
    compare(method, maximize=True, graphs=2 if method.startswith("IF") else 1)


@needs_cuda
@pytest.mark.parametrize(
    ("make", "options"),
    [(rootfree.RFShampoo, {}), (rootfree.RFFullAdagrad, {"damping": 0.1})],
    ids=["RFShampoo", "RFFullAdagrad"],
)
def test_methods_that_factorise_are_refused(make, options):
    """Cholesky waits for the device."""
    optimizer = make(network().cuda().parameters(), batch_size=BATCH, **options)
    with pytest.raises(ValueError, match=f"a step of {make.__name__} cannot be .* Cholesky"):
        rootfree.GraphedStep(optimizer)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "RFAdamW", "IFShampoo"])
def test_a_schedule_of_a_tensor_step_size_needs_no_new_graph(method):
    graphs = 2 if method.startswith("IF") else 1
    schedulers = {}

    def change(run, i):
        if run not in schedulers:
            schedulers[run] = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.8)
        elif i:
            schedulers[run].step()

    runs = compare(method, capturable=True, change=change, graphs=graphs)
    assert runs[0].optimizer.param_groups[0]["lr"].item() < 0.01 * 0.8 ** (STEPS - 3)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "RFRMSprop-bf16", "IFShampoo", "IFShampoo-rms"])
def test_numbers_may_change_at_every_step_without_a_new_graph(method):
    """Where kernels run; also those of plain floats."""
    graphs = 2 if method.startswith("IF") else 1

    def change(run, i):
        run.optimizer.batch_size = BATCH + i
        for group in run.optimizer.param_groups:
            group.update(
                lr=0.01 / (1 + i),
                momentum=0.9 - 0.02 * i,
                weight_decay=0.1 + 0.01 * i,
                precond_lr=0.1 + 0.01 * i,
                damping=1e-3 * (1 + i),
            )

    compare(method, steps=14, change=change, graphs=graphs)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop-rules", "IFShampoo-rules", "IFShampoo-fp32"])
def test_numbers_that_change_are_recorded_anew_by_the_rules(method):
    def change(run, i):
        run.optimizer.batch_size = (BATCH, 2 * BATCH)[i // 6 % 2]
        for group in run.optimizer.param_groups:
            group["momentum"] = 0.9 if i < 12 else 0.5

    compare(method, steps=20, change=change)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "IFShampoo"])
def test_what_a_step_does_may_change(method):
    """Momentum that is turned off and on, Nesterov's, decay: other graphs."""

    def change(run, i):
        for group in run.optimizer.param_groups:
            group["momentum"] = 0.0 if 8 <= i < 14 else 0.9
            group["nesterov"] = i >= 18
            group["weight_decay"] = 0.1 * (i % 2)

    compare(method, steps=28, change=change)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "IFShampoo"])
def test_graphs_are_dropped_and_recorded_anew(method):
    def change(run, i):
        if i == 10 and run.graphed is not None:
            run.graphed.release()
            assert run.recorded == 0

    compare(method, steps=20, change=change, graphs=2 if method.startswith("IF") else 1)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "RFRMSprop-rules", "IFShampoo", "IFShampoo-rules"])
def test_more_kinds_of_steps_than_graphs_are_kept(method):
    """A number as step size that changes again and again: rules are recorded anew every time."""

    def change(run, i):
        for group in run.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + i // 6)

    compare(method, steps=48, change=change)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "IFShampoo"])
def test_more_kinds_in_turns_than_graphs_are_kept(method):
    """Each that left is recorded again, after it ran as usual: tables have room for that."""

    def change(run, i):
        for group in run.optimizer.param_groups:
            group["nesterov"] = i // 2 % 2 == 1
            group["weight_decay"] = 0.1 * (i // 4 % 2)
            group["decoupled_weight_decay"] = i // 8 % 2 == 1

    compare(method, steps=96, change=change)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "IFShampoo"])
def test_numbers_and_patterns_of_gradients_change(method):
    """A pattern that was forgotten has new tables when it comes again."""

    def change(run, i):
        ps = list(run.model.parameters())
        if i % 12 >= 6:
            ps[i % 6].grad = None
        for group in run.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + i)

    compare(method, steps=60, change=change)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "RFRMSprop-bf16", "IFShampoo"])
def test_graphed_and_usual_steps_in_turns(method):
    def change(run, i):
        if run.graphed is not None:
            run.step = run.optimizer.step if i % 5 == 4 else run.graphed.step

    compare(method, steps=20, change=change)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "IFShampoo"])
def test_gradients_that_are_missing_on_some_steps(method):
    def change(run, i):
        if i % 4 == 3:
            next(run.model.parameters()).grad = None

    compare(method, steps=24, change=change)


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "IFShampoo"])
def test_a_checkpoint_is_loaded_between_graphed_steps(method):
    """State is copied into the tensors that the graphs know, before and after steps as usual."""
    saved = {}

    def change(run, i):
        if i == 8:
            saved[run] = copy.deepcopy(run.optimizer.state_dict())
        if i == 12:
            run.optimizer.load_state_dict(saved[run])
        if run.graphed is not None:
            run.step = run.optimizer.step if i in (14, 15) else run.graphed.step

    compare(method, steps=24, change=change)


def on_the_device(optimizer) -> list[torch.Tensor]:
    """Parameters and state, less what the host counts: a replay of one's own does not count."""
    return [
        t.detach().clone()
        for group in optimizer.param_groups
        for p in group["params"]
        for t in (p, *[t for key, t in sorted(optimizer.state[p].items()) if key != "step"])
    ]


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "RFAdamW", "IFShampoo", "IFShampoo-rms"])
def test_a_graph_of_ones_own(method):
    """Capture after steps as usual; replays equal further steps, also after usual ones between.

    A capture counts as steps of the host; here it is a whole period of refreshes.
    """
    period = 2 if method.startswith("IF") else 1
    runs = [Run(method, graphed=False) for _ in range(2)]
    x, y = next(iter(batches(1)))
    for run in runs:
        run.backward(x, y)
        run.fixed = [p.grad.clone() for p in run.model.parameters()]
        for p, g in zip(run.model.parameters(), run.fixed, strict=True):
            p.grad = g
        for _ in range(2):
            run.optimizer.step()
    captured, usual = runs
    before = on_the_device(captured.optimizer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(period):
            captured.optimizer.step()
    assert identical(before, on_the_device(captured.optimizer)), "a capture does nothing"
    for i in range(4):
        if i == 2:  # as usual in between, with gradients elsewhere
            for run in runs:
                for p, g in zip(run.model.parameters(), run.fixed, strict=True):
                    p.grad = 2 * g
                for _ in range(period):
                    run.optimizer.step()
                for p, g in zip(run.model.parameters(), run.fixed, strict=True):
                    p.grad = g
        graph.replay()
        for _ in range(period):
            usual.optimizer.step()
        mine, its = (on_the_device(run.optimizer) for run in runs)
        assert identical(mine, its), f"replay {i}"


@needs_cuda
@pytest.mark.parametrize("method", ["RFRMSprop", "IFShampoo"])
def test_the_step_may_be_captured_again_and_again(method):
    run = Run(method, graphed=False)
    x, y = next(iter(batches(1)))
    run.backward(x, y)
    for _ in range(12):
        run.optimizer.step()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            run.optimizer.step()


@needs_cuda
def test_a_recorder_cannot_be_in_a_graph():
    from conformance.curvatures import FromGradients

    model = network().cuda()
    optimizer = rootfree.IFShampoo(
        model.parameters(), batch_size=BATCH, curvature=FromGradients("kronecker")
    )
    with pytest.raises(ValueError, match="must have the default curvature"):
        rootfree.GraphedStep(optimizer)
