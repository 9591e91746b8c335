"""What the diagonal methods share: state like the parameter, and one pass over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from rootfree.kernels.diagonal import FusedDiagonal
from rootfree.kernels.finite import unchanged_if
from rootfree.kernels.plan import kernels_run
from rootfree.kernels.rounding import advance_, widened
from rootfree.placement.local import is_sharded
from rootfree.rules import diagonal as rules
from rootfree.shell import gradients
from rootfree.shell.inspection import Factor, diagonal_factors
from rootfree.shell.optimizer import RootFreeOptimizer, states
from rootfree.shell.parameter_state import in_working_dtype, parameter_state, working_dtype
from rootfree.shell.step_counts import count_, first_count, lay_out_counts
from rootfree.shell.work import Group, GroupMemory, Work, portions_of

# Elements that are updated together where a copy of them is taken first.
AT_ONCE = 2**26


def _read_here(t: Tensor) -> bool:
    return gradients.host_reads(t.device) and not isinstance(t, FakeTensor)


class DiagonalOptimizer(RootFreeOptimizer):
    """Base of the diagonal methods: RF-RMSProp and RF-AdaGrad as they are, RF-AdamW by override."""

    _kernel: ClassVar[str] = "heavy_ball"  #: in kernels/triton_diagonal.py
    _gamma: ClassVar[float] = 1.0  #: γ: 1 averages, 0 sums

    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        # s = 1 and, with momentum, m = 0
        fill = {"preconditioner": 1.0, **({"momentum": 0.0} if group["momentum"] > 0 else {})}
        return {**parameter_state(p, group, fill, salt=len(self.state)), **self._count_of(p)}

    def _count_of(self, p: Tensor) -> dict[str, Tensor]:
        """The count of steps, in methods whose start depends on it."""
        return {"step": first_count(p)} if "fast_start" in self.options else {}

    def _lay_out(self, memory: GroupMemory) -> None:
        if "fast_start" in self.options:
            lay_out_counts(memory, clock=False)

    def _describe(self, p: Tensor, group: Group) -> str:
        return "diagonal"

    def _factors(self, p: Tensor, group: Group, row: Mapping[str, Tensor]) -> list[Factor]:
        s = row["preconditioner"]
        curvature = s.to(working_dtype(p)) + group["damping"]
        return diagonal_factors("preconditioner", curvature, s.dtype)

    def _direction_of(self, p: Tensor, group: Group, row: Mapping[str, Tensor]) -> Tensor | None:
        if is_sharded(p) or p.grad is None:
            return None
        curvature = row["preconditioner"].to(working_dtype(p)) + max(group["damping"], rules.TINY)
        u: Tensor = p.grad / curvature
        return u.neg_() if group["maximize"] else u

    def _update(self, work: Work) -> None:
        if not self._update_fused(work):
            self._update_unless_skipped(work)
        if "fast_start" in self.options:
            self._count(work)

    def _update_unless_skipped(self, work: Work) -> None:
        if work.skip is None:
            self._update_by_rule(work)
            return
        keys = ("preconditioner", "momentum", "rounding")
        for part in portions_of(work, AT_ONCE):
            changed = [tensor for key in keys for tensor in states(part, key)]
            with unchanged_if(work.skip, [*part.ps, *changed]):
                self._update_by_rule(part)

    def _count(self, work: Work) -> None:
        # Compiled steps remember nothing, also where they leave their graph.
        memory = None if torch.compiler.is_compiling() else self._memories.get(id(work.group))
        if memory is None:
            advance_(states(work, "step"), 1, skip=work.skip)
        else:
            count_(memory, work)

    def _update_by_rule(self, work: Work) -> None:
        ps, dtype, counters = work.ps, working_dtype(work.ps[0]), states(work, "rounding")
        group = work.group
        gs = in_working_dtype(ps, work.gs)
        with widened(states(work, "preconditioner"), dtype, counters, work.withins) as ss:
            # s <- (1 - β₂γ) s + β₂ B g²
            gs = self._accumulate_(work, ss, gs, self._start_rates(work, dtype))
        with widened(states(work, "momentum"), dtype, counters, work.withins) as ms:
            # m <- α₁ m + g/(s+λ) + κ p;  p <- p - β₁ m
            tail = self._tail(group)
            rules.preconditioned_heavy_ball_(ps, ms, gs, ss, lam=group["damping"], tail=tail)

    def _accumulate_(
        self, work: Work, ss: list[Tensor], gs: list[Tensor], rates: rules.Rate | None
    ) -> list[Tensor]:
        """s <- (1 - β₂γ) s + β₂ diag(H), where H = B·ggᵀ unless it is given.  Changes ss.

        `rates`: β₂ from `_start_rates`; None: that of the group. Returns the
        gradients. Where steps are limited, outliers are too; otherwise it is the paper's rule, and
        nothing is.
        """
        B, guarded = work.group["batch_size"], work.group["max_update"] is not None
        gamma = self._gamma
        beta2 = self._beta2(work.group) if rates is None else rates
        largest = rules.largest_of(states(work, "preconditioner")[0].dtype, ss[0].dtype)
        if self._curvature is None:
            if guarded:
                gs = rules.limited(gs, ss, reach=rules.reach(gain=beta2 * B, gamma=gamma))
            rules.accumulate_squares_(ss, gs, beta2=beta2, B=B, gamma=gamma, largest=largest)
        else:
            hs = self._curvature.diagonals(work.params, gs, work.offsets, B=B)
            if guarded:
                gs, hs = rules.limited_together(
                    gs, hs, ss, reach=rules.reach(gain=beta2, gamma=gamma)
                )
            rules.accumulate_(ss, hs, beta2=beta2, gamma=gamma, largest=largest)
        return gs

    @staticmethod
    def _beta2(group: Group) -> float:
        """β₂ after the start."""
        return cast("float", group["precond_lr"])

    def _counts(self, work: Work) -> list[Tensor]:
        """How often parameters were updated, where β₂ depends on it; else empty."""
        fast = work.group.get("fast_start", False) and self._beta2(work.group) > 0
        return states(work, "step") if fast else []

    def _start_rates(self, work: Work, dtype: torch.dtype) -> rules.Rate | None:
        """β₂ in this step, one number where the host knows that all parameters have the same.

        None where it knows that no start goes on.
        """
        beta2, steps = self._beta2(work.group), self._counts(work)
        if not steps:
            return None
        counts = torch.stack(steps)
        if not _read_here(counts):
            return rules.start_rate(counts.to(dtype), beta2)
        rates = rules.start_rate(counts.to(torch.float64), beta2)  # exactly β₂ after the start
        least, largest = (float(rate) for rate in rates.aminmax())
        if largest == beta2:
            return None
        return largest if least == largest else rates

    def _update_fused(self, work: Work) -> bool:
        """Update by one launch; returns False, with nothing done, where there is no kernel."""
        if work.kernel is None:
            plain = {type(p) for p in work.ps} <= {Tensor, nn.Parameter}
            # The kernel's noise is that of whole parameters.
            parts_rounded = work.withins is not None and states(work, "rounding")
            if self._curvature is not None or not plain or parts_rounded:
                return False
            if not kernels_run(work.ps[0], self._fused):
                return False
            work.kernel = FusedDiagonal(work.ps)
        self._send_numbers(work)
        return work.kernel.update_(
            self._kernel,
            work.gs,
            states(work, "preconditioner"),
            states(work, "momentum"),
            states(work, "rounding"),
            self._counts(work),
            self._tail(work.group),
            work.skip,
        )

    def _reads_numbers(self, work: Work) -> bool:
        return work.kernel is not None and work.kernel.fits

    def _send_numbers(self, work: Work) -> None:
        if work.kernel is not None:
            group = work.group
            work.kernel.send(
                self._tail(group),
                beta2=self._beta2(group),
                gamma=self._gamma,
                B=group["batch_size"],
                lam=group["damping"],
            )
