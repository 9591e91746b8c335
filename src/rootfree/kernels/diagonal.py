"""One launch for a list of parameters: what the diagonal methods use on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rootfree.gradients import KnownList
from rootfree.kernels.addresses import AddressTable
from rootfree.kernels.block_table import as_table
from rootfree.kernels.launch import launch, triton_kernels
from rootfree.rules.diagonal import TINY

Tensors = list[Tensor]

# A program's share: large enough to pay for looking up where it is, small enough to spread.
CHUNK, BLOCK, WARPS = 4096, 1024, 8
_PARAMETERS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Plan:
    """What does not change between steps of one list of parameters."""

    ps: Tensors
    items: Tensor
    sizes: Tensor
    here: AddressTable  # parameters, preconditioners, momenta, counters
    there: AddressTable  # gradients
    plain: bool
    strides: list[tuple[int, ...]] | None = None  # None: the kernel cannot take them


class FusedDiagonal:
    """Runs one of the updates of triton_diagonal.py; a list's plan stays with the list."""

    def __init__(self, update: str) -> None:
        self._update = update

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
        # Where there is no momentum or no counter the kernel does not read the place.
        mine = [*ps, *ss, *(ms or ss), *(counters or ss)]
        if not plan.plain or not self._fit(plan, mine, gs, rounded=bool(counters)):
            return False
        if isinstance(lr, Tensor) and lr.device.type == "cpu":
            lr = lr.item()
        kernels = triton_kernels()
        with torch.cuda.device_of(ps[0]):
            launch(
                kernels.diagonal.diagonal_kernel,
                len(plan.items),
                plan.items,
                plan.sizes,
                plan.here.tensor,
                plan.there.tensor,
                lr if isinstance(lr, Tensor) else plan.sizes,
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
                ALIGNED=plan.here.aligned and plan.there.aligned,
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
        known = ps.known if isinstance(ps, KnownList) else {}
        if "plan" not in known:
            device = ps[0].device
            chunks = [
                (i, chunk) for i, p in enumerate(ps) for chunk in range(-(-p.numel() // CHUNK))
            ]
            items = as_table(chunks, torch.int32, device)
            sizes = as_table([p.numel() for p in ps], torch.int64, device)
            known["plan"] = _Plan(
                ps,
                items,
                sizes,
                AddressTable(4 * len(ps), device, beside=(items, sizes)),
                AddressTable(len(ps), device, beside=(items, sizes)),
                plain={type(p) for p in ps} <= {Tensor, torch.nn.Parameter}
                and ps[0].dtype in _PARAMETERS,
            )
        plan: _Plan = known["plan"]
        return plan

    def _fit(self, plan: _Plan, mine: Tensors, gs: Tensors, *, rounded: bool) -> bool:
        """Whether layouts and dtypes suit the kernel; tells it where everything is.

        Parameters and state that did not move since the last step have not changed their layout.
        """
        if plan.here.send(mine):
            strides = [p.stride() for p in plan.ps]
            count = len(strides)
            alike = all(_alike(t, plan.ps[i % count]) for i, t in enumerate(mine[: 3 * count]))
            # The noise of rounding counts elements in the order of the indices.
            dense = all(p.is_contiguous() or (not rounded and _dense(p)) for p in plan.ps)
            plan.strides = strides if dense and alike else None
        if plan.strides is None or {type(g) for g in gs} != {Tensor}:
            return False
        if plan.strides != [g.stride() for g in gs] and not all(map(_alike, gs, plan.ps)):
            return False
        if len({g.dtype for g in gs}) > 1:
            return False
        plan.there.send(gs)
        return True


def _alike(t: Tensor, p: Tensor) -> bool:
    """Whether t is laid out like p; the stride of an axis of size one says nothing."""
    axes = zip(t.stride(), p.stride(), p.shape, strict=True)
    return t.shape == p.shape and all(mine == its or size == 1 for mine, its, size in axes)


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
