"""IFShampoo with KFAC curvature is the published SINGD: its factors, step by step.

The mapping of the options is in `singd_notes`; their K is our second factor, their C our first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rootfree
from rootfree.recorders import KFACRecorder

pytest.importorskip("singd")

STEPS, BATCH = 30, 6
# 30 steps of some 20 roundings; measured 1.4e-15. The bar is 1e-8.
AGREES = 1e-12


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.Tanh(),
            nn.Conv2d(4, 3, 2, bias=False),
            nn.Flatten(),
            nn.Linear(12, 5),
            nn.Tanh(),
            nn.Linear(5, 3, bias=False),
        ).double()


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 2, 5, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (BATCH,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


@pytest.fixture
def _singd_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """singd looks up in which dtype to compute, in a list that lacks float64."""
    for module in ("hierarchical", "triltoeplitz", "triutoeplitz"):
        path = f"singd.structures.{module}.lowest_precision"
        monkeypatch.setattr(path, lambda *dtypes: torch.float64, raising=False)


#: their name -> ours; their block-diagonal class applies K where Kᵀ is meant
STRUCTURES = {
    "dense": "dense",
    "diagonal": "diagonal",
    "hierarchical15_15": "hierarchical:15",
    "triltoeplitz": "lower_toeplitz",
    "triutoeplitz": "upper_toeplitz",
}


@pytest.mark.slow
@pytest.mark.usefixtures("_singd_in_float64")
@pytest.mark.filterwarnings("ignore")  # singd warns where it computes densely
@pytest.mark.parametrize(
    ("structure", "sharing", "alpha"),
    [
        *[(structure, "expand", 0.5) for structure in STRUCTURES],
        ("dense", "reduce", 0.5),
        ("hierarchical15_15", "reduce", 0.0),
        ("triltoeplitz", "expand", 0.0),
    ],
)
def test_factors_are_those_of_singd(structure: str, sharing: Any, alpha: float) -> None:
    from singd.optim.optimizer import SINGD

    theirs, ours = network(), network()
    rate = 0.02
    common = {"lr": 0.05, "momentum": 0.9, "damping": 0.1, "weight_decay": 0.02}
    peer = SINGD(
        theirs,
        **common,
        alpha1=alpha,
        lr_cov=rate * (1 - alpha),
        T=2,
        structures=(structure, structure),
        kfac_approx=sharing,
    )
    recorder = KFACRecorder(ours, sharing=sharing)
    optimizer = rootfree.IFShampoo(
        ours.parameters(),
        **common,
        batch_size=BATCH,
        curvature=recorder,
        riemannian_momentum=alpha,
        precond_lr=rate,
        update_every=2,
        factor_norm=None,
        max_update_rms=None,
        nesterov=False,
        decoupled_weight_decay=False,
        init_scale=1.0,
        # A convolution without bias is (outputs, inputs·height·width) for SINGD: merged.
        block_size=64,
        structure=STRUCTURES[structure],
    )
    for step in range(STEPS):
        peer.zero_grad()
        loss_of(theirs, step).backward()
        peer.step()
        optimizer.zero_grad()
        with recorder.when(step % 2 == 0):
            loss_of(ours, step).backward()
        optimizer.step()
    for name, module in ours.named_modules():
        if name not in peer.Ks:
            continue
        group, weight = optimizer.param_groups[0], module.weight
        ((prefix, _, structures),) = optimizer._cut(weight, group)
        for n, factor in enumerate((peer.Cs[name], peer.Ks[name])):
            K = structures[n].unpack(optimizer.state[weight][f"{prefix}factor{n}"])[0]
            expected = factor.to_dense()
            assert not torch.allclose(expected, torch.eye(len(expected)).double(), atol=1e-3)
            assert float((K - expected).norm() / expected.norm()) < AGREES
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert float((p - q).norm() / q.norm()) < AGREES
