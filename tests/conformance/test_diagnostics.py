"""`optimizer.diagnostics()` says what is so, waits for nothing, and warns before rounding rules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import rootfree
from conformance.problems import batches, identical, network, snapshot, train
from conformance.rows import ROWS
from conformance.test_compiled_and_asynchronous import CountSynchronisations
from rootfree.rules.rf_shampoo import inverse
from rootfree.shell.inspection import factor_limit, matrix_limit
from rootfree.structures import Dense
from rootfree.structures.conditions import condition, unit_diagonal

MATRICES = [row for row in ROWS if issubclass(row.optimizer, rootfree.RFShampoo.__base__)]


def trained(row, steps=5, **overrides):
    model = network()
    optimizer = row.make(model.named_parameters(), **overrides)
    train(model, optimizer, batches(steps - 1))
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, batches(1))
    return model, optimizer, before


def test_norms_and_the_size_of_the_last_step(row):
    # By then a safeguard has found its unit.
    model, optimizer, before = trained(row, steps=12, weight_decay=0.0)
    found = optimizer.diagnostics(conditions=False).read()
    assert [p.name for p in found] == [name for name, _ in model.named_parameters()]
    half = any(value == torch.bfloat16 for value in row.settings.values())
    for p, old, mine in zip(model.parameters(), before, found, strict=True):
        assert mine.shape == tuple(p.shape)
        assert mine.parameter_norm == pytest.approx(p.norm().item(), rel=1e-5)
        assert mine.gradient_norm == pytest.approx(p.grad.norm().item(), rel=1e-5)
        m = optimizer.state[p].get("momentum")
        assert (mine.momentum_norm is None) == (m is None)
        if m is not None:
            assert mine.momentum_norm == pytest.approx(m.float().norm().item(), rel=1e-5)
        moved = (p - old).norm() / p.norm()
        assert mine.update_ratio == pytest.approx(moved.item(), rel=0.02 if half else 2e-3)


@pytest.mark.parametrize(
    "method", ["RFRMSprop", "RFAdamW", "RFShampoo", "IFShampoo", "IFWhitening"]
)
def test_the_size_of_a_step_uphill(method):
    """Nesterov's step has gradient and momentum in it: both with the sign of the step."""
    (row,) = [row for row in ROWS if row.name == method]
    model, optimizer, before = trained(row, steps=12, weight_decay=0.0, maximize=True)
    assert optimizer.defaults["nesterov"]
    for p, old, mine in zip(
        model.parameters(), before, optimizer.diagnostics(conditions=False).read(), strict=True
    ):
        moved = (p - old).norm() / p.norm()
        assert mine.update_ratio == pytest.approx(moved.item(), rel=2e-3)


def test_without_its_gradient_the_momentum_stands_for_a_step():
    model, optimizer, _ = trained(ROWS[0], nesterov=True)
    exact = optimizer.diagnostics().read()
    model.zero_grad()
    found = optimizer.diagnostics().read()
    for p, known, mine in zip(model.parameters(), exact, found, strict=True):
        assert mine.gradient_norm is None
        lr = ROWS[0].settings["lr"]
        m = optimizer.state[p]["momentum"]
        assert mine.update_ratio == pytest.approx((lr * m.norm() / p.norm()).item(), rel=1e-5)
        assert mine.update_ratio != known.update_ratio


def test_asking_waits_for_nothing_and_changes_nothing(row):
    _, optimizer, _ = trained(row)
    before = snapshot(optimizer)
    with CountSynchronisations() as counter:
        found = optimizer.diagnostics()
    assert counter.seen == []
    assert identical(before, snapshot(optimizer))
    first = found.read()
    optimizer.step()  # what was asked before stays what it was
    assert found.read() == first


@pytest.mark.parametrize("row", MATRICES, ids=lambda row: row.name)
def test_conditions_of_every_method(row):
    """Against float64, from the checkpoint."""
    _, optimizer, _ = trained(row, steps=8)
    rows = optimizer.state_dict()["state"]
    for number, mine in enumerate(optimizer.diagnostics().read()):
        (p,) = [p for i, p in enumerate(optimizer.state) if i == number]
        group = optimizer.param_groups[0]
        structures = {k: s for k, _, all_s in optimizer._cut(p, group) for s in [all_s]}
        assert mine.factors
        for factor in mine.factors:
            prefix, name = factor.name.split(".")
            axis = int(name[-1]) if name[-1].isdigit() else 0
            K = rows[number][factor.name].double()
            matrix = any(key.startswith(f"{prefix}.inverse") for key in rows[number])
            dense = unit_diagonal(K) if matrix else structures[f"{prefix}."][axis].unpack(K)
            exact = torch.linalg.cond(dense).max().item()
            assert 0.7 < factor.condition / exact < 1.001
            assert factor.norm == pytest.approx(_norm(structures[f"{prefix}."][axis], K), rel=1e-4)
            assert factor.condition < factor.limit


def _norm(structure, K) -> float:
    return (K if K.dim() == 3 else structure.unpack(K)).norm().item()


@pytest.mark.parametrize("T", [1, 3, "logarithmic"])
def test_counts(T):
    model = network()
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=32, update_every=T)
    asked = []
    for x, y in batches(7):
        asked.append(optimizer.refreshes_next)
        train(model, optimizer, [(x, y)])
    next(model.parameters()).grad[:] = math.nan
    optimizer.step()
    found = optimizer.diagnostics(conditions=False)
    assert found.skipped_steps == 1
    assert {(p.steps, p.refreshes) for p in found.read()} == {(7, sum(asked))}
    assert "skipped steps: 1" in str(found)


def test_a_group_left_to_adamw():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3))
    groups = rootfree.parameter_groups(model)
    optimizer = rootfree.IFShampoo(groups, batch_size=2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).square().mean().backward()
        before = {p: p.detach().clone() for p in model.parameters()}
        optimizer.step()
    decay = optimizer.defaults["weight_decay"]
    ps = [p for group in optimizer.param_groups for p in group["params"]]
    adamw = 0
    for p, mine in zip(ps, optimizer.diagnostics().read(), strict=True):
        if "exp_avg" in optimizer.state[p]:
            adamw += 1
            moved = (p - before[p] * (1 - 1e-3 * decay)).norm() / p.norm()
            assert mine.update_ratio == pytest.approx(moved.item(), rel=1e-4)
            assert (mine.steps, mine.refreshes) == (3, None)
            assert mine.factors[0].name == "exp_avg_sq"
    assert adamw > 0


def test_a_parameter_that_starts_anew(row):
    """Its entry in the state was removed, as after pruning or growing it: it is as at first."""
    model, optimizer, _ = trained(row)
    fresh = row.make(network().named_parameters())
    optimizer.state.clear()
    model.zero_grad()
    found, expected = optimizer.diagnostics().read(), fresh.diagnostics().read()
    assert [p.factors for p in found] == [p.factors for p in expected]
    assert [p.momentum_norm for p in found] == [p.momentum_norm for p in expected]
    assert len(optimizer.state) == 0


def test_what_is_not_finite_is_named():
    model, optimizer, _ = trained(ROWS[0])
    weight = next(model.parameters())
    with torch.no_grad():
        weight[0] = math.inf
    optimizer.state[weight]["momentum"][0] = math.nan
    name = next(name for name, _ in model.named_parameters())
    lost = "has numbers that are not finite"
    found = optimizer.diagnostics()
    assert found.warnings() == [f"parameter {name} {lost}", f"momentum of {name} {lost}"]
    assert "nan" in str(found)


def test_nothing_to_tell():
    """Parameters without elements, gradients or steps."""
    ps = [nn.Parameter(torch.zeros(shape)) for shape in ((), (0, 3), (2, 2))]
    for make in (rootfree.RFRMSprop, rootfree.IFShampoo, rootfree.RFFullAdagrad):
        found = make(ps, batch_size=1).diagnostics()
        assert [p.gradient_norm for p in found.read()] == [None] * 3
        assert found.warnings() == []
        assert str(found).count("\n") == 4


@pytest.mark.parametrize("row", MATRICES, ids=lambda row: row.name)
def test_ill_conditioned_factors_are_named(row):
    _, optimizer, _ = trained(row)
    healthy = optimizer.diagnostics()
    assert healthy.warnings() == []
    p, key = list(optimizer.state)[3], healthy.read()[3].factors[0].name
    state = optimizer.state[p]
    K = state[key]
    if any("inverse" in name for name in state):
        K[0] = 1.0  # S or its inverse: all directions are one
    else:
        structure = optimizer._cut(p, optimizer.param_groups[0])[0][2][0]
        dense = structure.unpack(K[:1]).clone()
        dense[0, -1] = 0.0
        K[:1] = structure.pack(dense)
    found = optimizer.diagnostics()
    (message,) = found.warnings()
    assert f"factor {key} " in message
    assert "of parameter 4.weight is ill-conditioned" in message
    assert "!" in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_warning_comes_before_cholesky_breaks(dtype):
    """Spectra over ever more decades: where the inverse is no inverse, the limit is passed."""
    d, told, broken = 32, [], []
    draw = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=draw))[0]
    for decades in range(1, 20):
        spectrum = 10 ** (-decades * torch.linspace(0, 1, d, dtype=torch.float64))
        S = (Q * spectrum @ Q.T).to(dtype).unsqueeze(0)
        S = (S + S.mT) / 2
        error = (inverse(S).double() @ S.double() - torch.eye(d)).norm().item()
        broken.append(not error < 1)
        found = condition(Dense(d), unit_diagonal(S)).item()
        told.append(not found < matrix_limit(dtype))
    assert any(broken)
    assert not told[0]
    assert told.index(True) <= broken.index(True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_limit_of_a_factor_is_where_rounding_decides(dtype):
    """Rounded to the dtype, the smallest singular value is lost beyond the limit, not far below."""
    d = 16
    draw = torch.Generator().manual_seed(0)
    Q, R = (torch.linalg.qr(torch.randn(d, d, dtype=torch.float64, generator=draw))[0],) * 2
    limit = factor_limit(dtype, torch.float32, beta2=0.1)

    def error(cond: float) -> float:
        spectrum = torch.ones(d, dtype=torch.float64)
        spectrum[-1] = 1 / cond
        K = Q * spectrum @ R.T
        smallest = torch.linalg.svdvals(K.to(dtype).double())[-1].item()
        return abs(smallest * cond - 1)

    assert error(limit / 100) < 0.1
    assert error(limit * 100) > 1


def test_narrow_products_lower_the_limit():
    kept = torch.float32
    assert factor_limit(kept, kept, beta2=0.1) == 2**23
    assert factor_limit(kept, torch.bfloat16, beta2=0.1) == pytest.approx(1280)
    assert factor_limit(torch.bfloat16, torch.bfloat16, beta2=0.1) == 128
