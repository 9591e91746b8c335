"""The IF-Shampoo oracle reproduces the published SIRFShampoo, every parameter, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("sirfshampoo")
pytest.importorskip("singd")

from oracles.if_shampoo import IFShampooOracle
from oracles.kronecker import squeeze
from peers.network import BATCH_SIZES, Trajectory, make_network, train
from peers.sirfshampoo_runs import (
    STRUCTURES,
    float64_structures,
    run_sirfshampoo,
    sirfshampoo_class,
    structure_classes,
)

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


def run_oracles(
    steps: int,
    *,
    structures: str | dict[int, Any] = "dense",
    batch_size: int | None = None,
    **settings: Any,
) -> tuple[Trajectory, list[float]]:
    """Train the tiny network with one oracle per parameter; also ‖m‖ of every refresh."""
    network = make_network()
    named = dict(network.named_parameters())
    oracles = {}
    for name, p in named.items():
        axes = squeeze(p.detach().numpy()).ndim
        kinds = structures if isinstance(structures, str) else structures[axes]
        oracles[name] = IFShampooOracle(p.detach().numpy(), structures=kinds, **settings)
    norms: list[float] = []

    def step(count: int) -> None:
        for name, p in named.items():
            assert p.grad is not None
            oracles[name].batch_size = count if batch_size is None else batch_size
            new = oracles[name].step(p.grad.numpy())
            norms.extend(oracles[name].norms)
            with torch.no_grad():
                p.copy_(torch.from_numpy(new))

    def factors() -> dict[str, list[torch.Tensor]]:
        return {n: [torch.from_numpy(k) for k in o.factors] for n, o in oracles.items()}

    return train(network, step, steps, factors), norms


def largest_difference(a: Trajectory, b: Trajectory) -> float:
    """Largest relative difference of any parameter or factor at any step."""
    worst = 0.0
    for left, right in zip(a.params, b.params, strict=True):
        for name in left:
            worst = max(worst, _relative(left[name], right[name]))
    for lefts, rights in zip(a.factors, b.factors, strict=True):
        for name in lefts:
            for left_k, right_k in zip(lefts[name], rights[name], strict=True):
                worst = max(worst, _relative(left_k, right_k))
    return worst


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


# 30 steps of float64, fed back through the network: the largest difference seen is 3e-13
TOLERANCE = 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES)
def test_oracle_follows_sirfshampoo(structure: str) -> None:
    published = run_sirfshampoo(STEPS, structures=structure, **SETTINGS)
    ours, norms = run_oracles(STEPS, structures=structure, **SETTINGS)
    assert published.batch_sizes[:3] == list(BATCH_SIZES)
    assert largest_difference(ours, published) < TOLERANCE
    assert min(norms) < 1 < max(norms)  # the normalisation is seen on and off
    moved = _relative(published.params[-1]["conv.weight"], published.params[0]["conv.weight"])
    assert moved > 1e-2  # the agreement is not that of two optimizers that stand still


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"update_every": 3},
        {"update_every": lambda t: t in (0, 1, 5)},
        {"momentum": 0.0},
        {"riemannian_momentum": 0.0},
        {"weight_decay": 0.0},
        {"damping": 0.0},
        {"batch_size": 7},
        {"structures": {1: "diagonal", 2: ("dense", "lower_triangular"), 4: "diagonal"}},
    ],
    ids=lambda c: next(iter(c)),
)
def test_oracle_follows_sirfshampoo_in_every_setting(changes: dict[str, Any]) -> None:
    settings = {**SETTINGS, **changes}
    published = run_sirfshampoo(STEPS, **settings)
    ours, _ = run_oracles(STEPS, **settings)
    assert largest_difference(ours, published) < TOLERANCE


def test_the_comparison_notices_a_constant_that_is_off() -> None:
    published = run_sirfshampoo(5, **SETTINGS)
    for name in SETTINGS:
        ours, _ = run_oracles(5, **{**SETTINGS, name: SETTINGS[name] * 1.001})
        assert largest_difference(ours, published) > 1e-7, name
    ours, _ = run_oracles(5, **SETTINGS, factor_norm="spectral")
    assert largest_difference(ours, published) > 1e-4


def test_published_squeezing_and_start() -> None:
    network = make_network()
    optimizer = sirfshampoo_class()(network)
    for (_, p), ks in zip(network.named_parameters(), optimizer.preconditioner, strict=True):
        assert [len(k.to_dense()) for k in ks] == list(squeeze(p.detach().numpy()).shape)
        assert all(torch.equal(k.to_dense(), torch.eye(len(k.to_dense())).double()) for k in ks)


# --- where the package leaves the specification: numbered as in `sirfshampoo_runs` -----------


def test_1_batch_size_is_the_leading_size_of_the_first_positional_input() -> None:
    network = make_network()
    optimizer = sirfshampoo_class()(network)
    images, tokens = torch.randn(4, 2, 4, 4).double(), torch.zeros(4, 3, dtype=torch.long)
    network(images, tokens)
    network(images, tokens)
    assert optimizer.batch_size == 8
    network.eval()
    network(images, tokens)
    assert optimizer.batch_size == 8
    network.train()
    with pytest.raises(IndexError):
        network(images=images, tokens=tokens)


def test_3_dense_is_the_only_registered_structure() -> None:
    from sirfshampoo import SIRFShampoo

    assert set(SIRFShampoo.SUPPORTED_STRUCTURES) == {"dense"}


def test_4_published_block_diagonal_takes_its_blocks_for_symmetric() -> None:
    block = structure_classes(corrected=False)["block_diagonal:2"]
    k = block.from_dense(torch.tensor([[1.0, 2.0], [0.0, 1.0]]).double())
    x = torch.eye(2).double()
    with float64_structures():
        assert torch.equal(k.rmatmat(x), k.to_dense() @ x)  # not the transpose
        assert torch.equal(k.from_inner().to_dense(), k.to_dense() @ k.to_dense().T)  # not KᵀK
    published = run_sirfshampoo(4, structures="block_diagonal:2", corrected=False, **SETTINGS)
    ours, _ = run_oracles(4, structures="block_diagonal:2", **SETTINGS)
    by_step = [
        max(_relative(ours.params[t][n], p) for n, p in published.params[t].items())
        for t in range(4)
    ]
    # K is symmetric after the first refresh and no longer after the second
    assert by_step[0] < 1e-14
    assert by_step[1] > 1e-6


@pytest.mark.parametrize("structure", ["block_diagonal:2", "lower_toeplitz", "hierarchical:3,2"])
def test_5_published_structures_refuse_float64(structure: str) -> None:
    k = structure_classes(corrected=False)[structure].eye(6, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="float64"):
        k.rmatmat(torch.eye(6).double())


def test_6_zero_rates_and_missing_gradients_are_refused() -> None:
    network = make_network()
    for name in ("lr", "beta2"):
        with pytest.raises(ValueError, match=name):
            sirfshampoo_class()(network, **{name: 0.0})
    with pytest.raises(AttributeError):
        sirfshampoo_class()(network, batch_size=1).step()


def test_7_factors_live_outside_state() -> None:
    network = make_network()
    optimizer = sirfshampoo_class()(network)
    train(network, lambda _: optimizer.step(), 1)
    assert {key for state in optimizer.state.values() for key in state} == {"momentum_buffer"}
