"""Matrix optimizers beside their oracles: given the same words, fed the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import rootfree
from oracles.full_matrix import IFCovarianceOracle, IFFactorOracle, RFFullMatrixOracle
from oracles.if_shampoo import IFShampooOracle
from oracles.kronecker import squeeze
from oracles.rf_shampoo import RFShampooOracle

Array = np.ndarray
Options = dict[str, Any]

# One step is some 20 roundings of 1.1e-16, 25 steps: 6e-14 if they all add up; what amplifies them
# is a factor's condition number, some 10 here. Measured: 1e-15.
AGREES = 1e-12

#: every structure, by the library's name
STRUCTURES = (
    "dense",
    "diagonal",
    "block_diagonal:2",
    "lower_triangular",
    "upper_triangular",
    "lower_toeplitz",
    "upper_toeplitz",
    "hierarchical:1",
    "hierarchical:2",
)


def early_and_then_rarely(step: int) -> bool:
    """A schedule by name: 'rules.matrix_runs:early_and_then_rarely'."""
    return step < 3 or step % 5 == 0


SCHEDULE = "rules.matrix_runs:early_and_then_rarely"


def _common(options: Options) -> Options:
    words = {k: v for k, v in options.items() if k not in ("block_size", "form", "structure")}
    if words.get("update_every") == SCHEDULE:
        words["update_every"] = early_and_then_rarely
    return words


def oracle_structures(structure: Any, axes: int) -> list[str]:
    """The oracle's names of a library `structure`, one per axis."""
    if isinstance(structure, dict):
        structure = structure.get(axes, "auto")
    names = structure if isinstance(structure, tuple) else (structure,) * axes
    auto = "diagonal" if axes == 1 else "dense"
    names = tuple(auto if name == "auto" else name for name in names)
    return [f"{n},{n.split(':')[1]}" if n.startswith("hierarchical") else n for n in names]


def if_shampoo(start: Array, options: Options) -> IFShampooOracle:
    axes = squeeze(start).ndim
    structures = oracle_structures(options.get("structure", "auto"), axes)
    return IFShampooOracle(start, **_common(options), structures=structures)


def rf_shampoo(start: Array, options: Options) -> RFShampooOracle:
    return RFShampooOracle(start, **_common(options))


def rf_full(start: Array, options: Options) -> RFFullMatrixOracle:
    return RFFullMatrixOracle(start, **_common(options))


def if_factor(start: Array, options: Options) -> IFFactorOracle:
    words = _common(options)
    scale = words.pop("init_scale", 1.0)
    oracle = IFFactorOracle(
        start, **words, exponential="truncated", initial=float(scale) * np.eye(start.size)
    )
    return oracle


class _BoundedCovariance(IFCovarianceOracle):
    """Rule 4 with β₂/max(1, ½ tr(S⁻¹H)): what the library documents for any `factor_norm`."""

    def refresh(self, grad: Array, curvature: Array | None) -> None:
        beta2 = self.precond_lr
        size = np.trace(self.inverse @ self.damped(grad, curvature)) / 2
        self.precond_lr = beta2 / max(1.0, float(size))
        super().refresh(grad, curvature)
        self.precond_lr = beta2


def if_covariance(start: Array, options: Options) -> IFCovarianceOracle:
    words = _common(options)
    kind = IFCovarianceOracle if words.pop("factor_norm") is None else _BoundedCovariance
    return kind(start, **words)


def _full(optimizer: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    return lambda ps, **options: optimizer(ps, **{"block_size": None, **fixed, **options})


#: The tail of the paper, which the oracles have by default.
PLAIN: Options = {
    "nesterov": False, "decoupled_weight_decay": False, "rate_by_rank": False
}  # fmt: skip

#: name -> (optimizer, oracle)
METHODS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "RFFullAdagrad": (_full(rootfree.RFFullAdagrad, safeguard=False), rf_full),
    "IFFullAdagrad-covariance": (
        _full(rootfree.IFFullAdagrad, form="covariance", safeguard=False),
        if_covariance,
    ),
    "IFFullAdagrad-factor": (
        _full(rootfree.IFFullAdagrad, form="factor", safeguard=False),
        if_factor,
    ),
    "RFShampoo": (
        _full(rootfree.RFShampoo, factor_norm=None, init_scale=1.0, **PLAIN),
        rf_shampoo,
    ),
    "IFShampoo": (_full(rootfree.IFShampoo, **PLAIN), if_shampoo),
}


def dense_factors(optimizer: rootfree.RootFreeOptimizer, p: torch.Tensor) -> list[Array]:
    """What the oracles keep, from the state of an uncut parameter: K_n, S_n, A, S⁻¹ or S."""
    ((_, _, structures),) = optimizer._cut(p, optimizer.param_groups[0])
    state = optimizer.state[p]
    if "block0.factor" in state:  # S of the damped full matrix
        return [state["block0.factor"][0].numpy()]
    if "block0.inverse" in state:
        return [state["block0.inverse"][0].numpy()]
    return [s.unpack(state[f"block0.factor{n}"])[0].numpy() for n, s in enumerate(structures)]


def oracle_factors(oracle: Any) -> list[Array]:
    if isinstance(oracle, RFFullMatrixOracle):
        return [oracle.precond if oracle.damping > 0 else np.linalg.inv(oracle.precond)]
    if isinstance(oracle, IFCovarianceOracle):
        return [oracle.inverse]
    if isinstance(oracle, IFFactorOracle):
        return [oracle.factor]
    return list(oracle.factors)


def gradients(shape: tuple[int, ...], scale: float, seed: int, steps: int) -> list[Array]:
    """Gaussian, with a spike every seventh step: both branches of every max and cap are met."""
    rng = np.random.default_rng(seed)
    return [
        np.asarray(scale * (5.0 if t % 7 == 4 else 1.0) * rng.normal(size=shape))
        for t in range(steps)
    ]


def difference(
    method: str,
    options: Options,
    *,
    shape: tuple[int, ...] = (3, 4),
    scale: float = 0.3,
    seed: int = 0,
    steps: int = 25,
    oracle_options: Options | None = None,
    given: list[Array] | None = None,
) -> float:
    """Largest relative difference of the parameter or a factor, over all steps; all finite."""
    make, make_oracle = METHODS[method]
    start = np.asarray(np.random.default_rng(seed + 1).normal(size=shape))
    oracle = make_oracle(start, {**options, **(oracle_options or {})})
    p = nn.Parameter(torch.tensor(start))
    optimizer = make([p], **options)
    worst, largest = 0.0, float(np.linalg.norm(start))
    for g in given or gradients(shape, scale, seed, steps):
        p.grad = torch.tensor(g)
        optimizer.step()
        expected = oracle.step(g)
        largest = max(largest, float(np.linalg.norm(expected)))
        offs = [float(np.linalg.norm(p.detach().numpy() - expected)) / largest]
        pairs = zip(dense_factors(optimizer, p), oracle_factors(oracle), strict=True)
        offs += [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
        assert np.isfinite(offs).all()
        worst = max(worst, *offs)
    return worst
