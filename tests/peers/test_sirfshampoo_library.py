"""rootfree.IFShampoo with the paper's settings follows the published SIRFShampoo, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sirfshampoo")
pytest.importorskip("singd")

import rootfree
from conformance.rows import PAPER
from peers import sirfshampoo_runs
from peers.network import Trajectory, make_network, train
from peers.sirfshampoo_runs import run_sirfshampoo

# singd warns when a structure falls back to dense algebra
pytestmark = pytest.mark.filterwarnings("ignore:Calling naive implementation")

STEPS = 30
SETTINGS: dict[str, Any] = {
    "lr": 0.05,
    "precond_lr": 0.2,
    "momentum": 0.9,
    "riemannian_momentum": 0.5,
    "damping": 0.01,
    "weight_decay": 0.02,
}
#: the library's name -> the harness's; a hierarchical structure has two equal borders with us
STRUCTURES = {
    "dense": "dense",
    "diagonal": "diagonal",
    "block_diagonal:2": "block_diagonal:2",
    "lower_triangular": "lower_triangular",
    "upper_triangular": "upper_triangular",
    "lower_toeplitz": "lower_toeplitz",
    "upper_toeplitz": "upper_toeplitz",
    "hierarchical:1": "hierarchical:1,1",
    "hierarchical:2": "hierarchical:2,2",
}


@pytest.fixture(autouse=True)
def _hierarchical_with_equal_borders(monkeypatch):
    """The published template with the sizes that both libraries have."""
    from singd.structures.hierarchical import HierarchicalMatrixTemplate

    published = sirfshampoo_runs.structure_classes

    def with_equal_borders(*, corrected: bool = True) -> dict[str, Any]:
        sizes = {
            f"hierarchical:{k},{k}": type(
                f"Hierarchical{k}", (HierarchicalMatrixTemplate,), {"MAX_K1": k, "MAX_K2": k}
            )
            for k in (1, 2)
        }
        return {**published(corrected=corrected), **sizes}

    monkeypatch.setattr(sirfshampoo_runs, "structure_classes", with_equal_borders)


def run_library(steps: int, *, structure: Any = "dense", **settings: Any) -> Trajectory:
    """Train the tiny network by IFShampoo as in the paper; the trajectory holds dense factors."""
    network = make_network()
    named = dict(network.named_parameters())
    words = {**PAPER, "structure": structure, "batch_size": 1, **SETTINGS, **settings}
    optimizer = rootfree.IFShampoo(network.parameters(), **words)
    fixed = "batch_size" in settings

    def step(count: int) -> None:
        if not fixed:
            optimizer.batch_size = count
        optimizer.step()

    def factors() -> dict[str, list[Tensor]]:
        found = {}
        for name, p in named.items():
            ((prefix, _, structures),) = optimizer._cut(p, optimizer.param_groups[0])
            state = optimizer.state[p]
            found[name] = [
                s.unpack(state[f"{prefix}factor{n}"])[0].clone() for n, s in enumerate(structures)
            ]
        return found

    return train(network, step, steps, factors)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def largest_difference(ours: Trajectory, published: Trajectory) -> float:
    """Largest relative difference of any parameter or factor at any step."""
    assert ours.batch_sizes == published.batch_sizes
    offs = [
        relative(left[name], right[name])
        for left, right in zip(ours.params, published.params, strict=True)
        for name in right
    ]
    offs += [
        relative(a, b)
        for left, right in zip(ours.factors, published.factors, strict=True)
        for name in right
        for a, b in zip(left[name], right[name], strict=True)
    ]
    assert torch.tensor(offs).isfinite().all()
    return max(offs)


# 30 steps of float64 round-off, fed back through the network: measured, at most 2e-13
TOLERANCE = 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("structure", "update_every"),
    [*((name, 1) for name in STRUCTURES), ("dense", 3), ("hierarchical:2", 3)],
)
def test_library_follows_sirfshampoo(structure, update_every):
    published = run_sirfshampoo(
        STEPS, structures=STRUCTURES[structure], update_every=update_every, **SETTINGS
    )
    ours = run_library(STEPS, structure=structure, update_every=update_every)
    assert largest_difference(ours, published) < TOLERANCE
    for name in ("conv.weight", "linear.weight", "norm.weight", "embedding.weight"):
        # agreement is not that of two optimizers that stand still
        assert relative(published.params[-1][name], published.params[0][name]) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"momentum": 0.0},
        {"riemannian_momentum": 0.0},
        {"momentum": 0.0, "riemannian_momentum": 0.0},
        {"weight_decay": 0.0},
        {"damping": 0.0},
        {"precond_lr": 0.01},
    ],
    ids=str,
)
def test_library_follows_sirfshampoo_in_every_setting(changes):
    published = run_sirfshampoo(STEPS, **{**SETTINGS, **changes})
    assert largest_difference(run_library(STEPS, **changes), published) < TOLERANCE


def test_library_follows_sirfshampoo_with_a_fixed_batch_size():
    published = run_sirfshampoo(STEPS, batch_size=7, **SETTINGS)
    assert largest_difference(run_library(STEPS, batch_size=7), published) < TOLERANCE


def test_library_follows_sirfshampoo_with_structures_by_number_of_axes():
    structure = {1: "diagonal", 2: ("dense", "lower_triangular"), 4: "upper_toeplitz"}
    published = run_sirfshampoo(STEPS, structures=structure, **SETTINGS)
    assert largest_difference(run_library(STEPS, structure=structure), published) < TOLERANCE


def test_the_comparison_notices_a_constant_that_is_off():
    published = run_sirfshampoo(5, **SETTINGS)
    for name in SETTINGS:
        ours = run_library(5, **{name: SETTINGS[name] * 1.001})
        assert largest_difference(ours, published) > 1e-7, name
    for change in ({"factor_norm": "spectral"}, {"init_scale": 1.01}, {"gamma": 0.99}):
        assert largest_difference(run_library(5, **change), published) > 1e-5, change
