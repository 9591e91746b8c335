"""Small float64 networks, batches, and dense curvature matrices of a parameter by brute force."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import rootfree


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The same float64 module for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().double()


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(n: int, classes: int, seed: int = 2) -> Tensor:
    return torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(seed))


def dense(H: rootfree.KroneckerCurvature | rootfree.SumOfOuterProducts | None) -> Tensor:
    """The explicit matrix of a curvature, row-major."""
    if isinstance(H, rootfree.KroneckerCurvature):
        product = torch.ones(1, 1, dtype=torch.float64)
        for U in H.factors:
            product = torch.kron(product, U if U.dim() == 2 else U.diag())
        return product
    assert isinstance(H, rootfree.SumOfOuterProducts)
    V = H.V.flatten(1)
    return V.mT @ V


def joint_matrix(layer: nn.Module, jacobian: dict[nn.Parameter, Tensor]) -> Tensor:
    """Rows by [W b] flattened row-major, from rows by weight and by bias."""
    weight = jacobian[layer.weight].flatten(2)
    if layer.bias is not None:
        weight = torch.cat([weight, jacobian[layer.bias].unsqueeze(-1)], dim=2)
    return weight.flatten(1)


def rows_by(values: Sequence[Tensor], params: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
    """The gradient of each value by each parameter, stacked."""
    grads = [torch.autograd.grad(v, params, retain_graph=True, allow_unused=True) for v in values]
    return {
        p: torch.stack([torch.zeros_like(p) if g[k] is None else g[k] for g in grads])
        for k, p in enumerate(params)
    }


def relative(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())
