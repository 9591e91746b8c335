"""`rootfree verify`: every claim holds, and every claim fails when the library is made wrong."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import rootfree
from rootfree.curvature import OuterProducts
from rootfree.methods import inverse_free
from rootfree.rules import diagonal, if_whitening, rf_shampoo
from rootfree.rules import full_matrix as full_matrix_rules
from rootfree.rules import if_shampoo as if_shampoo_rules
from rootfree.structures import Dense, LowerTriangular
from rootfree_lab.cli import terminal
from rootfree_lab.cli.app import app
from rootfree_lab.verify import fisher, gaussian, report
from rootfree_lab.verify.claim import Claim, Measured
from rootfree_lab.verify.report import CLAIMS

Patch = pytest.MonkeyPatch
Perturbation = Callable[[Patch], None]


def measured(name: str) -> Measured:
    ((_, result),) = report.measure([CLAIMS[name]], seed=0)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_the_claim_holds(name):
    result = measured(name)
    assert result.passed, f"{result.figure:.4g}, must be {result.bar} ({result.detail})"


# -- a library made wrong -----------------------------------------------------------------------


def wrapped(target: Any, name: str, change: Callable[..., Any]) -> Perturbation:
    """Replace `target.name` by change(original, ...)."""

    def apply(patch: Patch) -> None:
        original = getattr(target, name)
        patch.setattr(target, name, lambda *args, **kwargs: change(original, *args, **kwargs))

    return apply


def batch_size_off(call: Callable[..., Any], *args: Any, B: int, **kwargs: Any) -> Any:
    """B off by 1 % where the loss is averaged: B times a number common to all B would cancel."""
    return call(*args, B=B * 1.01 if B > 1 else B, **kwargs)


def batch_size_ignored(call: Callable[..., Any], *args: Any, B: int, **kwargs: Any) -> Any:
    """B left out."""
    return call(*args, B=1, **kwargs)


def batch_size_off_in(method: Any) -> Perturbation:
    """B off by 1 % in one optimizer, in all its paths: what it computes from B, and H."""

    def apply(patch: Patch) -> None:
        direction = method._direction

        def off(group: Any, *args: Any) -> Any:
            B = group["batch_size"]
            return direction({**group, "batch_size": B * 1.01 if B > 1 else B}, *args)

        patch.setattr(method, "_direction", staticmethod(off))
        wrapped(method, "_curvature_of", batch_size_off)(patch)

    return apply


def curvature_off(method: str) -> Perturbation:
    """B off by 1 % in one of the two ways in which the curvature is used."""

    def off(call: Callable[..., Any], H: OuterProducts, *args: Any) -> Any:
        B: Any = H.weight * 1.01 if H.weight > 1 else H.weight
        return call(OuterProducts(H.V, B, H.scale), *args)

    return wrapped(OuterProducts, method, off)


def start_ignores_batch_size(call: Callable[..., Any], H: OuterProducts, *args: Any) -> Any:
    """B left out of the gradient-scaled start."""
    return call(OuterProducts(H.V, scale=H.scale), *args)


def rooted(call: Callable[..., Any], ps: Any, ms: Any, gs: Any, ss: Any, **kwargs: Any) -> None:
    """g/√s for g/s."""
    call(ps, ms, gs, [s.sqrt() for s in ss], **kwargs)


def damped(call: Callable[..., Any], *args: Any, lam: float, **kwargs: Any) -> Any:
    """Damping where none was asked for."""
    return call(*args, lam=lam + 1e-3, **kwargs)


def normalised(call: Callable[..., Any], S_inv: Any, g: Any, **kwargs: Any) -> Any:
    """A gradient of unit length, which depends on the coordinates."""
    return call(S_inv, g / g.norm(dim=1, keepdim=True), **kwargs)


def doubled(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The factor ½ of hₙ replaced by 1."""
    return [2 * h for h in call(*args, **kwargs)]


def transposed_gram(patch: Patch) -> None:
    """KKᵀ for KᵀK in the damping term."""
    patch.setattr(Dense, "project_factor_gram", lambda self, K: K @ K.mT)


def no_curvature(patch: Patch) -> None:
    """A preconditioner that stays at one: gradient descent, which any rotation leaves alone."""
    patch.setattr(diagonal, "accumulate_squares_", lambda *args, **kwargs: None)


def without_decay(
    call: Callable[..., Any], S_inv: Any, g: Any, *, gamma: float, **kwargs: Any
) -> Any:
    """The old S not weighted down by 1-β₂γ."""
    return call(S_inv, g, gamma=0.0, **kwargs)


def smaller_W(weight: float) -> Perturbation:
    """β₂²/2·W times a weight, in the general covariance form."""

    def rule(call: Any, S_inv: torch.Tensor, H: torch.Tensor, *, beta2: Any, gamma: float) -> None:
        P = S_inv @ H @ S_inv
        W = P @ H @ S_inv - 2 * gamma * P + gamma**2 * S_inv
        S_inv.mul_(1 + beta2 * gamma).sub_(beta2 * P).add_(weight * beta2**2 / 2 * W)

    return wrapped(full_matrix_rules, "if_covariance_", rule)


def step_off(call: Callable[..., Any], *args: Any, beta2: list[float], **kwargs: Any) -> None:
    """β₂ off by 1 %."""
    call(*args, beta2=[1.01 * rate for rate in beta2], **kwargs)


def norm_of_the_stack(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """One norm for all blocks of a call."""
    norms = call(*args, **kwargs)
    return norms.amax().expand_as(norms)


def rounded_to_bf16(call: Callable[..., Any], Ks: Any, *args: Any, **kwargs: Any) -> None:
    """Factors kept in bfloat16, to nearest, as in the published implementation."""
    call(Ks, *args, **kwargs)
    if kwargs["dtype"] == torch.bfloat16:
        for K in Ks:
            K.copy_(K.bfloat16())


def biased_labels(patch: Patch) -> None:
    """Labels from another model than the one whose gradients are taken."""
    wrapped(fisher, "draw_labels", lambda call, generator, p: call(generator, 0.9 * p))(patch)


start_off = wrapped(OuterProducts, "root_mean_diagonal", start_ignores_batch_size)
contracted_off, in_frame_off = curvature_off("contracted"), curvature_off("in_frame")
half_replaced = wrapped(if_shampoo_rules, "tangents", doubled)
factor_damped = wrapped(if_shampoo_rules, "tangents", damped)
exact_off = batch_size_off_in(rootfree.RFFullAdagrad)
inverse_free_off = batch_size_off_in(rootfree.IFFullAdagrad)
covariance_off = wrapped(full_matrix_rules, "if_covariance_rank_one_", batch_size_off)
# B enters the optimizer's rank-one path with the gradient's unit, which has no B of its own.
unit_off = wrapped(full_matrix_rules, "unit_gradient", batch_size_off)


# H off by 1 % where it is given as a sum of outer products.
contracted_scaled = wrapped(
    OuterProducts, "contracted", lambda call, H, *args: [1.01 * C for C in call(H, *args)]
)
dense_scaled = wrapped(OuterProducts, "dense", lambda call, H: 1.01 * call(H))


def nothing(call: Callable[..., Any], *args: Any) -> None:
    """No balance."""


def diagonal_alone(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return [E.diagonal(dim1=1, dim2=2).diag_embed() for E in call(*args, **kwargs)]


no_powers_of_two = wrapped(
    if_shampoo_rules, "exponents", lambda call, means: [1.1 * e for e in call(means)]
)
singular = wrapped(
    if_whitening, "move_factors_",
    lambda call, Cs, *args, **kwargs: (call(Cs, *args, **kwargs), Cs[0][:, 0].zero_()),
)  # fmt: skip
half_of_the_errors = wrapped(
    if_whitening, "errors", lambda call, *args, **kwargs: [E / 2 for E in call(*args, **kwargs)]
)


def flat_weights(call: Callable[..., Any], d: int) -> Any:
    """Nodes that do not stand for a Gaussian."""
    points, weights = call(d)
    return points, torch.full_like(weights, 1 / len(weights))


def not_twice(patch: Patch) -> None:
    """Entries without a mirror image counted once."""
    patch.setattr(LowerTriangular, "project", lambda self, M: self.pack(M))


def of_full_rank(call: Callable[..., Any], H: OuterProducts, *args: Any) -> Any:
    return [C + torch.eye(C.shape[-1], dtype=C.dtype) for C in call(H, *args)]


def last_gradient_alone(call: Callable[..., Any], ss: Any, gs: Any, **kwargs: Any) -> None:
    """s = g², no average."""
    for s, g in zip(ss, gs, strict=True):
        s.copy_(g.square())


def rounded_to_nearest(call: Callable[..., Any], K: Any, new: Any, counters: Any) -> None:
    K.copy_(new)


def indefinite(call: Callable[..., Any], S: Any) -> Any:
    """An inverse with an eigenvalue below zero."""
    least, largest = torch.linalg.eigvalsh(call(S))[..., [0, -1]].unbind(-1)
    return call(S) - (least + 1e-4 * largest)[:, None, None] * torch.eye(S.shape[-1])


shampoo_damped = wrapped(rf_shampoo, "update_factors_", damped)
no_coordinates = wrapped(gaussian, "local", lambda call, d: 1.01 * call(d))
another_divergence = wrapped(
    gaussian, "_divergence", lambda call, S, cov: call(S, cov) + 1e-3 * torch.trace(S @ S)
)

PERTURBATIONS: dict[str, list[Perturbation]] = {
    "fisher-rank": [wrapped(OuterProducts, "contracted", of_full_rank)],
    "gaussian-identities": [wrapped(gaussian, "nodes", flat_weights)],
    "gaussian-step": [dense_scaled, another_divergence],
    "gaussian-blocks": [another_divergence],
    "gaussian-local": [no_coordinates],
    "chain-rule": [shampoo_damped, contracted_scaled],
    "chain-rule-structures": [half_replaced, factor_damped, not_twice],
    "scale-rf-adagrad": [wrapped(diagonal, "accumulate_squares_", batch_size_off)],
    "scale-if-factor": [in_frame_off, inverse_free_off],
    "affine-rf-adagrad": [wrapped(diagonal, "preconditioned_heavy_ball_", rooted)],
    "bounded-direction": [wrapped(diagonal, "accumulate_squares_", last_gradient_alone)],
    "root-scale": [wrapped(diagonal, "accumulate_squares_", batch_size_ignored)],
    "one-axis": [shampoo_damped, contracted_off],
    "bf16-structures": [wrapped(if_shampoo_rules, "move_factors_", rounded_to_bf16)],
    "bf16-stored": [wrapped(inverse_free, "stochastic_round_", rounded_to_nearest)],
    "positive-definite-state": [wrapped(rf_shampoo, "inverse", indefinite)],
    "balance-blocks": [no_powers_of_two],
    "fisher-joint": [contracted_off],
    "fisher-monte-carlo": [contracted_off, biased_labels],
    "fisher-cross-terms": [contracted_off, biased_labels],
    "scale-rf-rmsprop": [wrapped(diagonal, "accumulate_squares_", batch_size_off)],
    "scale-rf-full": [exact_off, wrapped(full_matrix_rules, "woodbury_", batch_size_off)],
    "scale-if-covariance": [inverse_free_off, unit_off],
    "scale-rf-shampoo": [contracted_off],
    "scale-if-shampoo": [in_frame_off],
    "scale-from-gradient": [in_frame_off, start_off],
    "scale-needs-batch-size": [wrapped(diagonal, "accumulate_squares_", batch_size_ignored)],
    "affine-rf-rmsprop": [wrapped(diagonal, "preconditioned_heavy_ball_", rooted)],
    "affine-rf-full": [wrapped(full_matrix_rules, "woodbury_", normalised)],
    "affine-if-covariance": [wrapped(full_matrix_rules, "if_covariance_rank_one_", normalised)],
    "affine-if-factor": [factor_damped],
    "affine-rf-shampoo": [wrapped(rf_shampoo, "update_factors_", damped)],
    "affine-if-shampoo": [factor_damped],
    "affine-limits": [no_curvature],
    "affine-root-breaks": [wrapped(diagonal, "preconditioned_heavy_ball_", rooted)],
    "woodbury": [
        wrapped(full_matrix_rules, "woodbury_", batch_size_off),
        wrapped(full_matrix_rules, "woodbury_", without_decay),
    ],
    "positive-definite": [smaller_W(0.0), smaller_W(0.9)],
    "covariance-square": [smaller_W(0.99), smaller_W(2.0)],
    "covariance-rank-one": [covariance_off, smaller_W(0.99)],
    "first-order-if-covariance": [exact_off, inverse_free_off, covariance_off, unit_off],
    "first-order-if-factor": [in_frame_off, half_replaced, transposed_gram],
    "first-order-if-shampoo": [in_frame_off, contracted_off, half_replaced, transposed_gram],
    "truncation": [
        in_frame_off,
        half_replaced,
        transposed_gram,
        wrapped(if_shampoo_rules, "move_factors_", step_off),
    ],
    "one-factor": [in_frame_off, half_replaced, transposed_gram],
    "batched-blocks": [wrapped(inverse_free, "norm_of", norm_of_the_stack)],
    "bf16-frobenius": [wrapped(if_shampoo_rules, "move_factors_", rounded_to_bf16)],
    "bf16-spectral": [wrapped(if_shampoo_rules, "move_factors_", rounded_to_bf16)],
    "balance": [wrapped(if_shampoo_rules, "balance_", nothing), no_powers_of_two],
    "whitening-scale": [wrapped(if_whitening, "errors", damped)],
    "whitening-orthogonal": [wrapped(if_whitening, "errors", diagonal_alone)],
    "whitening-fixed-point": [wrapped(if_whitening, "errors", damped)],
    "whitening-first-order": [half_of_the_errors],
    "whitening-positive-definite": [singular],
}


def test_every_claim_has_a_perturbation():
    assert PERTURBATIONS.keys() == CLAIMS.keys()
    assert all(PERTURBATIONS.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "perturb"),
    [
        pytest.param(name, perturb, id=f"{name}-{i}")
        for name, perturbations in PERTURBATIONS.items()
        for i, perturb in enumerate(perturbations)
    ],
)
def test_the_claim_fails_when_the_library_is_wrong(name, perturb, monkeypatch):
    perturb(monkeypatch)
    result = measured(name)
    assert not result.passed, f"{result.figure:.4g} still passes {result.bar}"


def test_claims_are_measured_on_one_thread_and_the_rest_is_left_as_it_was():
    """Their problems are tiny: two threads on busy cores take ten times as long."""
    seen = []
    claim = Claim("threads", "", lambda generator: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        list(report.measure([claim], seed=0))
        assert seen == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# -- the command --------------------------------------------------------------------------------


QUICK = ("affine-root-breaks", "woodbury")  # and the order of the table


def run(*arguments: str):
    return CliRunner().invoke(app, ["verify", *arguments])


def only(*names: str) -> list[str]:
    return [argument for name in names for argument in ("--only", name)]


def test_one_line_a_claim():
    result = run(*only(*reversed(QUICK)))
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[:2] for line in lines] == [["pass", name] for name in QUICK]
    assert float(lines[1].split()[2]) < 1e-12
    assert "< 1e-12" in lines[1]


def test_a_failure_is_shown_and_exits_with_one(monkeypatch, tmp_path):
    for perturb in PERTURBATIONS["woodbury"]:
        perturb(monkeypatch)
    path = tmp_path / "figures.json"
    result = run(*only(*QUICK), "--json", str(path))
    assert result.exit_code == 1
    assert [line.split()[:2] for line in result.output.splitlines()] == [
        ["pass", QUICK[0]],
        ["FAIL", QUICK[1]],
    ]
    written = json.loads(path.read_text(encoding="utf-8"))
    assert not written["passed"]
    assert [claim["passed"] for claim in written["claims"]] == [True, False]


def test_json_holds_what_was_measured(tmp_path):
    path = tmp_path / "figures.json"
    result = run(*only("woodbury"), "--seed", "3", "--json", str(path))
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["passed"]
    assert written["seed"] == 3
    assert written["torch"] == torch.__version__
    (claim,) = written["claims"]
    assert set(claim) == {"name", "sentence", "figure", "bar", "passed", "detail"}
    assert claim["sentence"] == CLAIMS["woodbury"].sentence
    ((_, again),) = report.measure([CLAIMS["woodbury"]], seed=3)
    assert claim["figure"] == again.figure
    assert claim["figure"] != measured("woodbury").figure  # another seed


def test_an_unknown_name_is_refused_with_the_nearest():
    result = run(*only("woodbery"))
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "the claim 'woodbery' is unknown; did you mean 'woodbury'?" in said
    with pytest.raises(ValueError, match="allowed: fisher-joint"):
        report.chosen(["%"])  # like nothing there is


@pytest.mark.parametrize(
    "arguments", [("--seed", "-1"), ("--seed", "x"), ("--json", "/no/such"), ("--json", ".")]
)
def test_bad_arguments_are_refused(arguments):
    result = run(*only(QUICK[0]), *arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_terminal_gets_a_table(monkeypatch):
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr(terminal, "console", console)
    result = run(*only("woodbury"))
    assert result.exit_code == 0
    assert result.output == ""  # all of it went to the console
    assert "│ woodbury" in console.file.getvalue()


def test_the_rows_of_the_table():
    nothing = Measured(float("nan"), "< 1", False, "what it was")
    results = [(CLAIMS["woodbury"], measured("woodbury")), (Claim("mine", "", None), nothing)]
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    console.print(report.as_table(results))
    rows = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line.split("│")[1:-1]][::3] for line in rows] == [
        ["woodbury", "pass"],
        ["mine", "FAIL"],
    ]
    # JSON has no NaN
    assert json.loads(report.as_json(results, seed=0))["claims"][1]["figure"] is None
