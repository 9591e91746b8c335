"""How an optimizer is doing: norms, conditions of its factors, sizes of its steps.

`optimizer.diagnostics()` computes everything on the devices of the tensors. The numbers are copied
to the host, all at once, when they are first read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rootfree.kernels.fixed import mapped
from rootfree.shell.schedules import schedule
from rootfree.shell.summary import aligned


@dataclass(frozen=True)
class FactorDiagnostics:
    """One factor of a preconditioner, in all blocks of the parameter that have it.

    Attributes:
        name: its key in the state.
        structure: its structure and size, such as "dense 64".
        dtype: the dtype that it is kept in.
        norm: Frobenius norm over all blocks.
        condition: the largest condition number of a block, estimated from below (usually more than
            three quarters of it; exact for diagonal factors). Of the factor K where the
            preconditioner is KKᵀ: that of KKᵀ is its square. Matrices S and S⁻¹ are scaled to a
            unit diagonal first, as the rules do before they invert them.
        limit: the condition at which rounding determines the smallest singular values.

    Example:
        >>> import torch, rootfree
        >>> optimizer = rootfree.IFShampoo(torch.nn.Linear(4, 3).parameters(), batch_size=32)
        >>> weight, bias = optimizer.diagnostics().read()
        >>> [(f.name, f.structure, f.condition) for f in weight.factors]
        [('block0.factor0', 'dense 3', 1.0), ('block0.factor1', 'dense 4', 1.0)]
    """

    name: str
    structure: str
    dtype: torch.dtype
    norm: float
    condition: float | None
    limit: float

    @property
    def is_ill_conditioned(self) -> bool:
        """Whether the condition is at the limit or beyond, or not a number."""
        return self.condition is not None and not self.condition < self.limit


@dataclass(frozen=True)
class ParameterDiagnostics:
    """Numbers of one parameter; None if there is no such number.

    Attributes:
        name: the parameter's name, or its number.
        shape: its shape; of a sharded parameter that of the part on this rank.
        parameter_norm: ‖p‖.
        gradient_norm: of the gradient that was in ``p.grad``.
        momentum_norm: of the momentum, or average, of directions.
        update_ratio: RMS of a step over RMS of the parameter, without decoupled decay.
        steps: how often the parameter was updated; diagonal methods do not count.
        update_every: T, or a schedule, of refreshes of its preconditioner.
        factors: what its preconditioner is made of.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = rootfree.IFShampoo(model.named_parameters(), batch_size=32)
        >>> weight, bias = optimizer.diagnostics().read()
        >>> weight.name, weight.shape, weight.steps, weight.condition
        ('weight', (3, 4), 0, 1.0)
    """

    name: str
    shape: tuple[int, ...]
    parameter_norm: float
    gradient_norm: float | None
    momentum_norm: float | None
    update_ratio: float | None
    steps: int | None
    update_every: int | str | None
    factors: tuple[FactorDiagnostics, ...]

    @property
    def refreshes(self) -> int | None:
        """How often the schedule has asked for a refresh of its preconditioner."""
        if self.steps is None or self.update_every is None:
            return None
        if isinstance(self.update_every, int):
            return -(-self.steps // self.update_every)
        return sum(map(schedule(self.update_every), range(self.steps)))

    @property
    def condition(self) -> float | None:
        """The largest condition of its factors."""
        found = [f.condition for f in self.factors if f.condition is not None]
        return next((c for c in found if math.isnan(c)), max(found, default=None))


class Diagnostics:
    """What :meth:`rootfree.RootFreeOptimizer.diagnostics` returns; reading it waits for the device.

    Where ranks share a parameter, the numbers are those of the part on this rank. Nothing is
    communicated, so that one rank may ask alone.

    Args:
        measured: the parameters, with tensors on their devices in place of numbers.
        skipped: how many steps each device skipped.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = rootfree.IFShampoo(model.named_parameters(), batch_size=32)
        >>> model(torch.randn(32, 4)).square().mean().backward()
        >>> optimizer.step()
        >>> found = optimizer.diagnostics()
        >>> [p.name for p in found.read()], found.skipped_steps, found.warnings()
        (['weight', 'bias'], 0, [])
        >>> str(found).splitlines()[0].split()[:5]
        ['parameter', 'shape', 'norm', 'gradient', 'momentum']
    """

    def __init__(self, measured: Sequence[ParameterDiagnostics], skipped: Sequence[Tensor]) -> None:
        self._measured = (list(measured), list(skipped))

    @cached_property
    def _numbers(self) -> tuple[list[ParameterDiagnostics], list[float]]:
        found: tuple[list[ParameterDiagnostics], list[float]] = _on_host(self._measured)
        return found

    def read(self) -> list[ParameterDiagnostics]:
        """Numbers of every parameter, in the order of the groups."""
        return self._numbers[0]

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite."""
        return int(sum(self._numbers[1]))

    def warnings(self) -> list[str]:
        """A sentence for every ill-conditioned factor, and for everything that is not finite."""
        lost = [
            f"{what} {p.name} has numbers that are not finite"
            for p in self.read()
            for what, norm in (("parameter", p.parameter_norm), ("momentum of", p.momentum_norm))
            if norm is not None and not math.isfinite(norm)
        ]
        return lost + [
            f"factor {f.name} ({f.structure}) of parameter {p.name} {_complaint(f)}"
            for p in self.read()
            for f in p.factors
            if f.is_ill_conditioned
        ]

    def __str__(self) -> str:
        head = ("parameter", "shape", "norm", "gradient", "momentum", "update", "steps")
        rows: list[tuple[str, ...]] = [(*head, "refreshes", "condition")]
        for p in self.read():
            numbers = (p.parameter_norm, p.gradient_norm, p.momentum_norm, p.update_ratio)
            counts = ["-" if n is None else f"{n:,}" for n in (p.steps, p.refreshes)]
            marked = "!" if any(f.is_ill_conditioned for f in p.factors) else ""
            shape = "x".join(map(str, p.shape)) or "scalar"
            cells = [*map(_number, numbers), *counts, marked + _number(p.condition)]
            rows.append((p.name, shape, *cells))
        steps = f"skipped steps: {self.skipped_steps:,}"
        return "\n".join([aligned(rows, texts=2), steps, *self.warnings()])


def _on_host(tree: Any) -> Any:
    """The same with numbers in place of tensors, by one copy from each device."""
    tensors: dict[torch.device, list[Tensor]] = {}
    mapped(tree, lambda t: tensors.setdefault(t.device, []).append(t.double().reshape(())))
    numbers = {device: iter(torch.stack(each).tolist()) for device, each in tensors.items()}

    def number(t: Tensor) -> float:
        found = next(numbers[t.device])
        return found if t.is_floating_point() else int(found)

    return mapped(tree, number)


def _complaint(factor: FactorDiagnostics) -> str:
    if factor.condition is None or math.isnan(factor.condition):
        return "has numbers that are not finite"
    dtype = str(factor.dtype).removeprefix("torch.")
    return (
        f"is ill-conditioned: its condition number is at least {factor.condition:.1e}, the limit "
        f"of {dtype} here is {factor.limit:.1e}. A larger damping or a wider dtype helps"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
