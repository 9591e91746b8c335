"""One launch for a list of parameters: what the diagonal methods use on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rootfree.kernels.addresses import AddressTable
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.rules.diagonal import TINY

Tensors = list[Tensor]

# A program's share: large enough to pay for looking up where it is, small enough to spread.
CHUNK, BLOCK, WARPS = 4096, 2048, 8


@dataclass
class _Plan:
    """What does not change between steps of one list of parameters."""

    ps: Tensors  # held, so that their ids stay theirs
    strides: list[tuple[int, ...]]
    items: Tensor
    sizes: Tensor
    here: AddressTable  # parameters, preconditioners, momenta, counters
    gradients: AddressTable


class FusedDiagonal:
    """Runs one of the updates of triton_diagonal.py; remembers where the parameters are."""

    def __init__(self, update: str) -> None:
        self._update = update
        self._plans: dict[tuple[int, ...], _Plan] = {}

    def __call__(
        self,
        ps: Tensors,
        gs: Tensors,
        ss: Tensors,
        ms: Tensors,
        counters: Tensors,
        *,
        lr: float | Tensor,
        keep: float,
        gain: float,
        alpha1: float,
        lam: float,
        kappa: float,
    ) -> bool:
        """Update ps, ss, ms and counters in place; False, with nothing done, if they do not fit.

        What fits: plain tensors, not fp64, gradients and state laid out like their parameters.
        """
        plan = self._plan(ps)
        if not _fit(plan, ps, gs, ss, ms, counters):
            return False
        if isinstance(lr, Tensor) and lr.device.type == "cpu":
            lr = lr.item()
        # Where there is no momentum or no counter the kernel does not read the place.
        here = plan.here.send([*ps, *ss, *(ms or ss), *(counters or ss)])
        there = plan.gradients.send(gs)
        kernels = triton_kernels()
        launch(
            kernels.diagonal.diagonal_kernel,
            len(plan.items),
            plan.items,
            plan.sizes,
            here,
            there,
            lr if isinstance(lr, Tensor) else here,
            len(ps),
            0.0 if isinstance(lr, Tensor) else lr,
            keep,
            gain,
            alpha1,
            max(lam, TINY),
            kappa,
            P=kernels.dtype(ps[0]),
            G=kernels.dtype(gs[0]),
            S=kernels.dtype(ss[0]),
            UPDATE=kernels.diagonal.UPDATES[self._update],
            MOMENTUM=bool(ms),
            LR_AT=isinstance(lr, Tensor),
            ALIGNED=plan.here.aligned and plan.gradients.aligned,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        if counters:
            torch._foreach_add_(counters, 2 if ms else 1)
        for kind in (ps, ss, ms):  # autograd must know that they changed
            torch.autograd.graph.increment_version(kind)
        return True

    def _plan(self, ps: Tensors) -> _Plan:
        key = tuple(map(id, ps))
        if key not in self._plans:
            device = ps[0].device
            chunks = [
                (i, chunk) for i, p in enumerate(ps) for chunk in range(-(-p.numel() // CHUNK))
            ]
            self._plans[key] = _Plan(
                ps,
                [p.stride() for p in ps],
                torch.tensor(chunks, dtype=torch.int32).to(device),
                torch.tensor([p.numel() for p in ps]).to(device),
                AddressTable(4 * len(ps), device),
                AddressTable(len(ps), device),
            )
        return self._plans[key]


def _fit(
    plan: _Plan, ps: Tensors, gs: Tensors, ss: Tensors, ms: Tensors, counters: Tensors
) -> bool:
    strides = plan.strides
    return (
        ps[0].dtype != torch.float64
        and {type(p) for p in ps} <= {Tensor, torch.nn.Parameter}
        and {(type(g), g.dtype) for g in gs} == {(Tensor, gs[0].dtype)}
        and all([t.stride() for t in kind] == strides for kind in (ps, gs, ss, ms) if kind)
        # The noise of rounding counts elements in the order of the indices.
        and all(p.is_contiguous() or (not counters and _dense(p)) for p in ps)
    )


def _dense(p: Tensor) -> bool:
    """Whether the elements fill one piece of memory, in whatever order of the axes."""
    expected = 1
    for stride, size in sorted(zip(p.stride(), p.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
