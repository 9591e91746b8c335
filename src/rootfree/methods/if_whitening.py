"""Inverse-free whitening."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import BlockCurvature, Curvature
from rootfree.kernels import whitening
from rootfree.kernels.plan import Group, State, Structures
from rootfree.layout.tiles import Tile
from rootfree.methods.inverse_free import accumulators, factor_state, norm_of, start_
from rootfree.placement.sharded import Sharded
from rootfree.rules import LEAST_DAMPING
from rootfree.rules import if_whitening as rules
from rootfree.rules.if_shampoo import balance_, mean_squares, precondition
from rootfree.rules.momentum import Tail
from rootfree.shell.block_optimizer import BlockOptimizer
from rootfree.shell.options import WHITENING_OPTIONS
from rootfree.shell.parameter_state import working_dtype
from rootfree.shell.schedules import steps_between
from rootfree.shell.work import GroupMemory
from rootfree.structures.base import wide_dtype

# In the settings of a step: the share of `white_step` beyond which a step is scaled up to r.
_SHARE = "share_of_least"
# Gradients beyond have no square in fp32.
_LARGEST_MEAN = 1e30


def _direction(
    group: Group, structures: Structures, state: State, G: Tensor, H: BlockCurvature | None
) -> Tensor:
    if H is not None:
        _refresh_(group, structures, state, H, G)
    return precondition(G, _factors(structures, state, G.dtype), structures)


def _factors(structures: Structures, state: State, dtype: torch.dtype) -> list[Tensor]:
    """Cₙ of every axis, in the dtype of the products."""
    return [state[f"factor{n}"].to(dtype) for n in range(len(structures))]


def _rate(group: Group) -> float:
    """β of a refresh that stands for T steps: 1 - (1 - β₂)ᵀ; of a schedule without a T β₂."""
    beta2: float = group["precond_lr"]
    T = steps_between(group["update_every"])
    return 1 - float((1 - beta2) ** T) if T > 1 else beta2


def _refresh_(
    group: Group, structures: Structures, state: State, H: BlockCurvature, G: Tensor
) -> None:
    dtype, wide = G.dtype, wide_dtype(G.dtype)
    moves = _follow_size_(group, structures, state, H.root_mean_diagonal(G.shape[1:]))
    Cs = _factors(structures, state, dtype)
    Ps = [s.symmetric_product(C) for s, C in zip(structures, Cs, strict=True)]
    ones = [1.0] * len(Ps)
    # λ = ρ·v: whatever the scale of the loss
    lam = group["damping"] * state["mean_square"].to(wide) + LEAST_DAMPING
    sizes = mean_squares(Cs, ones, structures, wide=wide)
    lam = rules.limited(lam, sizes, structures)
    Es = rules.errors(Ps, ones, H.for_operands(dtype, 1.0), structures, lam=lam, wide=wide)

    def norm(n: int, E: Tensor) -> Tensor:
        return torch.where(moves, norm_of(group, structures[n], E, dtype=dtype), torch.inf)

    with accumulators(state, len(structures), wide) as stored:
        # C <- (I - β/2·E/max(1, ‖E‖)) C, and so P <- (I - …) P (I - …)
        rules.move_factors_(stored, Es, structures, beta2=_rate(group), norm=norm, dtype=dtype)
        balance_(stored, sizes)


def _follow_size_(group: Group, structures: Structures, state: State, root: Tensor) -> Tensor:
    """v <- v + β/100·(min(mean(G²), 1000 v) - v); blocks start with their first gradient.

    `root` (b,) is √mean(G²), or √(tr H/D) of a given curvature. Returns which blocks have a
    gradient; the others wait.  Changes state.
    """
    moves = (root > 0) & root.isfinite()
    # Pₙ = (mean G²)^{-1/(2N)}·I
    fresh = start_(state, root, power=-1 / (2 * len(structures)))
    v, square = state["mean_square"], root.square().clamp(max=_LARGEST_MEAN)
    limited = torch.where(v > 0, square.minimum(rules.MOST * v), square).to(v.dtype)
    followed = torch.where(fresh, square, v.lerp(limited, rules.SLOWLY * _rate(group)))
    v.copy_(torch.where(moves, followed, v))
    return moves


class IFWhitening(BlockOptimizer):
    r"""Inverse-free whitening: Shampoo *with* the root, moved by matrix products alone.

    .. code-block:: text

        U  = G with Pₙ applied on every axis n
        Eₙ = U₍ₙ₎U₍ₙ₎ᵀ/D₋ₙ + λ ∏_{j≠n} tr(Pⱼ²)/dⱼ · Pₙ² - I,   λ = ρ·v      every T steps
        Pₙ <- (I - β/2·Ê)Pₙ(I - β/2·Ê),   Ê = Eₙ/max(1, ‖Eₙ‖₂)            all from the old P
        U  = G with the new Pₙ applied on every axis n
        U  <- U·min(1, c/rms(U))                                          c is max_update_rms
        M  <- α₁ M + U;   the step is U + α₁ M (Nesterov), scaled to root mean square r
        W  <- (1 - β₁κ)W - β₁·step

    β = 1 - (1 - β₂)ᵀ, and v is a running mean of min(mean(G²), 1000 v), at the rate β/100. Where
    gradients have become small beside what they were, as close to a minimum, U is small too, and a
    step below that of white noise is not scaled up to r: the parameter comes to rest.

    ⊗Pₙ follows (E[ggᵀ])^{-½}: its fixed point is that of Shampoo by Kullback-Leibler divergence,
    which takes an eigendecomposition. There is no inverse, no root to compute, and nothing that
    could fail. The step does not depend on the scale of the loss: unlike the root-free methods it
    needs no batch size.

    Pₙ is kept by a factor, Pₙ = CₙCₙᵀ, and so is positive definite in every precision; Pₙ starts at
    (mean G²)^{-1/(2N)}·I from the first gradient that is not zero.

    With a fast start, β₂ is max(β₂, 50/(t + 50)) at step t (from 0), if there is a ``factor_norm``;
    and at t < 200 the step below which none is scaled up to r is smaller in the proportion t/200.

    Args:
        params: parameters, named parameters or groups, as for every torch optimizer; best from
            :func:`rootfree.parameter_groups`, which leaves embeddings, head and vectors to AdamW.
        lr: β₁, step size of the parameters (a number or a one-element tensor), in AdamW's units.
        precond_lr: β₂, step size of the factors a step. A refresh stands for T steps and has
            1 - (1 - β₂)ᵀ in its place, so that the factors follow as fast whatever T is. In the
            moving average of Shampoo this is a weight of 2β₂ for the new gradient.
        momentum: α₁, momentum on the direction, without dampening.
        nesterov: the step is U + α₁M in place of M.
        weight_decay: κ, decoupled, as in AdamW.
        damping: ρ, relative to the mean square of the gradient: for directions that get no
            gradient, such as pixels that are always black. It must not be zero there.
        update_every: T, or a schedule, as in :class:`rootfree.IFShampoo`. With "warm:<T>" the
            refreshes of the first 10 T steps too have 1 - (1 - β₂)ᵀ.
        structure: as in :class:`rootfree.IFShampoo`; dense, diagonal and block_diagonal:<k>.
        factor_norm: "spectral" (the rate does not depend on the width), "frobenius", or None (no
            normalisation: for studies of the plain rule).
        update_rms: r, the root mean square of a parameter's step before ``lr``. None: the step as
            it is.
        max_update_rms: cap on the root mean square of U per parameter, before momentum: U has about
            one, and a batch unlike the others must not rule the next ten steps. None: no cap.
        max_update: limit on each element of U, before momentum; None: no limit.
        fast_start: the start above. False: β₂ and the limit are the same in all steps. Without
            the host, as in a CUDA graph that you capture yourself, there is no fast start;
            :class:`rootfree.GraphedStep` has it.
        curvature: where H comes from, in place of ggᵀ, as in :class:`rootfree.IFShampoo`: then ⊗Pₙ
            follows H^{-½}.

    The other arguments are those of :class:`rootfree.IFShampoo`.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = rootfree.IFWhitening(model.parameters(), lr=1e-3)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 3)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
        >>> print(optimizer.summary().splitlines()[1])
        0          3x4    dense 3 x dense 4          161
    """

    options = WHITENING_OPTIONS
    _direction = staticmethod(_direction)
    _kernel = staticmethod(whitening.direction_)
    _rate = staticmethod(_rate)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 6e-3,  # β₁
        *,
        precond_lr: float = 0.3,  # β₂
        momentum: float = 0.9,  # α₁
        nesterov: bool = True,
        weight_decay: float = 0.01,  # κ
        damping: float = 1e-6,  # ρ
        update_every: int | str = 2,  # T
        structure: Any = "auto",
        block_size: int | None = 1024,
        factor_dtype: torch.dtype | None = None,
        matmul_dtype: torch.dtype | None = None,
        factor_norm: str | None = "spectral",
        update_rms: float | None = 0.2,
        max_update_rms: float | None = 1.0,
        max_update: float | None = None,
        fast_start: bool = True,
        state_dtype: torch.dtype | None = None,
        curvature: Curvature | None = None,  # H
        fused: bool | None = None,
        capturable: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        nonfinite: str = "skip",
        placement: Sharded | None = None,
    ) -> None:
        super().__init__(params, locals())

    def _block_state(self, p: Tensor, tile: Tile, structures: Structures, group: Group) -> State:
        state = factor_state(p, tile, structures, group, salt=len(self.state))
        v = torch.zeros(tile.blocks, dtype=working_dtype(p), device=p.device)
        return {**state, "mean_square": v}

    def _settings(self, group: Group, i: int, *, ago: int = 0) -> Group:
        clocks = self._clocks(self._memories.get(id(group)))
        if clocks is None:
            return group
        t, beta2 = max(0, clocks[i] - ago), group["precond_lr"]
        if group["factor_norm"] is not None:  # without, a large rate is no small change
            beta2 = rules.start_rate(t, beta2)
        return {**group, "precond_lr": beta2, _SHARE: rules.share_of_least(t)}

    def _apart(self, memory: GroupMemory) -> list[int] | None:
        clocks = self._clocks(memory)
        if clocks is None or min(clocks) == (farthest := max(clocks)):
            return None
        end = rules.end_of_start(memory.group["precond_lr"])
        # The same at every step for parameters that are updated in all of them.
        apart = [-1 if clock >= end else farthest - clock for clock in clocks]
        for i, owner in memory.owners.items():  # a bias follows the weight of its joint pair
            apart[i] = apart[owner]
        return apart

    def _clocks(self, memory: GroupMemory | None) -> list[int] | None:
        """How many steps each parameter has behind it; None where nothing depends on it."""
        if memory is None or not memory.group.get("fast_start") or not memory.params:
            return None
        steps = memory.steps
        if steps is None or isinstance(steps, FakeTensor):  # these estimate memory
            return None
        clocks: list[int] = steps.tolist()
        over = min(clocks) >= rules.end_of_start(memory.group["precond_lr"])
        return None if over or self._replayed_elsewhere(memory) else clocks

    def _replayed_elsewhere(self, memory: GroupMemory) -> bool:
        """Whether the step is recorded in a CUDA graph whose replays the host does not see."""
        on_gpu = any(device.type == "cuda" for device, *_ in memory.places)
        return on_gpu and not self._replayed_here and torch.cuda.is_current_stream_capturing()

    def _tail(self, group: Group) -> Tail:
        tail = super()._tail(group)
        # Where gradients have become small beside what they were, as at a minimum, so has the step,
        # and is not scaled up: the parameter comes to rest.
        least = white_step(tail.alpha1, nesterov=tail.nesterov) * group.get(_SHARE, 1.0)
        return tail._replace(decoupled=True, least=max(least, tail.least))


def white_step(alpha1: float, *, nesterov: bool) -> float:
    """The root mean square of the step when directions are white noise with one of one."""
    of_m = 1 / (1 - alpha1**2)  # M <- α₁ M + U, squared
    return math.sqrt((1 + alpha1) ** 2 + alpha1**4 * of_m if nesterov else of_m)
