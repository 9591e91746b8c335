"""Inverse-free Shampoo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from rootfree.curvature import Curvature
from rootfree.layout.structured import structured_tiles
from rootfree.layout.tiles import Tile
from rootfree.methods.inverse_free import direction, factor_state, product_dtype
from rootfree.shell.block_optimizer import BlockOptimizer, Structures
from rootfree.shell.optimizer import Group
from rootfree.shell.options import INVERSE_FREE_OPTIONS


class IFShampoo(BlockOptimizer):
    r"""Inverse-free Shampoo: a Kronecker-factored preconditioner moved by matrix products alone.

    .. code-block:: text

        Ĝ  = G with Kⱼᵀ applied on every axis j
        hₙ = ½(B·Ĝ₍ₙ₎Ĝ₍ₙ₎ᵀ/D₋ₙ + λ ∏_{j≠n} tr(KⱼᵀKⱼ)/dⱼ · KₙᵀKₙ - γI)     every T steps
        mₙ <- α₂ mₙ + (1 - α₂) hₙ
        Kₙ <- Kₙ (I - β₂ mₙ/max(1, ‖mₙ‖))                                 all from the old K
        U  = G with KₙKₙᵀ applied on every axis n
        M  <- α₁ M + U + κ W
        W  <- W - β₁ M

    There is no root, no inverse and no eigendecomposition, so it runs in bfloat16 and cannot fail
    to converge. Tensors of any order are taken: axes of size one are dropped, small input axes
    merged, axes longer than ``block_size`` cut into blocks, and blocks of equal shape go through
    one batched call.

    Args:
        params: parameters, named parameters or groups, as for every torch optimizer.
        lr: β₁, step size of the parameters (a number or a one-element tensor).
        batch_size: B, the number of loss terms that the loss averages; no default, see
            :class:`rootfree.RFRMSprop`.
        precond_lr: β₂, step size of the factors.
        momentum: α₁, heavy-ball momentum on the direction, without dampening.
        riemannian_momentum: α₂, momentum on the tangent vector of the factors (costs their memory).
        damping: λ, added to the curvature.
        weight_decay: κ, added to the direction; with ``update_rms`` decoupled.
        gamma: γ, 1 averages the curvature (Shampoo as RMSProp), 0 sums it (as AdaGrad).
        update_every: T, or a schedule: "logarithmic" and "logarithmic:<T>" refresh at every step
            early and ever more rarely (at most every T-th step) later; "module:function" names a
            function of the step count that returns whether to refresh.
        structure: "auto", a name, a tuple of names (one per axis), or a dict from the number of
            axes to either. Names: dense, diagonal, block_diagonal:<k>, lower_triangular,
            upper_triangular, hierarchical:<k>, lower_toeplitz, upper_toeplitz. "auto" is dense,
            but diagonal for vectors and for axes as long as a vocabulary.
        block_size: longer axes are cut into nearly equal blocks, and input axes merged up to this
            size; None: neither.
        factor_dtype: dtype of the factors. None: float32 (float64 for float64 parameters); the
            kernels keep such a matrix in two halves, "upper0" and "lower0" in place of "factor0" in
            the state. ``torch.bfloat16`` halves their memory and rounds stochastically.
        matmul_dtype: dtype of the matrix products. None: bfloat16 on CUDA, float32 elsewhere.
        factor_norm: "spectral" (the rate does not depend on the width), "frobenius" (the paper's),
            or None (no normalisation: for studies of the plain rule).
        update_rms: None (the paper's step), or r: the direction after momentum is rescaled to RMS r
            per parameter. With 0.2, learning rate and weight decay tuned for AdamW can be kept.
        max_update_rms: cap on the direction's RMS per parameter, before momentum; None: no cap.
        init_scale: Kₙ starts at this multiple of I; "gradient": at (tr H/D)^{-1/(2N)}·I, D the
            number of elements, from the first curvature that is not zero; for the default curvature
            that is (B·mean(G²))^{-1/(2N)}·I.
        state_dtype: dtype of the momentum, as in :class:`rootfree.RFRMSprop`.
        curvature: where H comes from, a :class:`rootfree.Curvature` such as a recorder of KFAC
            factors, in place of B·ggᵀ: hₙ then has the partial trace of KᵀHK. It is not part of
            the checkpoint.
        fused: None: fused kernels where Triton and a GPU are there; True insists, False does not
            use them. They take dense factors with bf16 products, and diagonal ones of vectors;
            what else there is goes through batched torch functions. Models of up to 34 million
            parameters have their directions replayed from CUDA graphs.
        capturable: as in :class:`rootfree.RFRMSprop`.

    With ``structure="dense", block_size=None, update_every=1, factor_norm="frobenius",
    init_scale=1.0, max_update_rms=None`` this is the paper's method, on every parameter. For low
    memory take ``factor_dtype=torch.bfloat16, state_dtype=torch.bfloat16``.

    The defaults were chosen on a byte-level transformer with 10.7 million parameters (1,200 steps
    of 16,384 tokens, linear decay) and a ResNet-18 on 10,000 CIFAR-10 images (30 epochs), one seed:
    they gave validation loss 1.100, where AdamW at the best of three step sizes gave 1.166 and Muon
    1.096, and with ``weight_decay=0.1`` 18.6 % test error, AdamW's 18.6 %. The cap on the update is
    not felt there (1.099, and 1.098 with a cap of 10, in one version), but keeps larger step sizes
    from diverging. With AdamW's habits, ``lr=2e-3, precond_lr=0.3, damping=1e-5, update_rms=0.2``
    gave 1.114.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = rootfree.IFShampoo(model.parameters(), lr=1e-2, batch_size=32)
        >>> x, y = torch.randn(32, 4), torch.randn(32, 3)
        >>> torch.nn.functional.mse_loss(model(x), y).backward()
        >>> optimizer.step()
        >>> print(optimizer.summary().splitlines()[1])
        0          3x4    dense 3 x dense 4          157
    """

    options = INVERSE_FREE_OPTIONS
    _direction = staticmethod(direction)
    _inverse_free = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,  # β₁
        *,
        batch_size: int | None = None,  # B
        precond_lr: float = 0.1,  # β₂
        momentum: float = 0.9,  # α₁
        riemannian_momentum: float = 0.0,  # α₂
        damping: float = 1e-4,  # λ
        weight_decay: float = 0.0,  # κ
        nesterov: bool = False,
        decoupled_weight_decay: bool = False,
        gamma: float = 1.0,  # γ
        update_every: int | str = 2,  # T
        structure: Any = "auto",
        block_size: int | None = 1024,
        factor_dtype: torch.dtype | None = None,
        matmul_dtype: torch.dtype | None = None,
        factor_norm: str | None = "spectral",
        update_rms: float | None = None,
        max_update_rms: float | None = 1.0,
        init_scale: float | str = "gradient",
        state_dtype: torch.dtype | None = None,
        curvature: Curvature | None = None,  # H
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        given = locals()
        options = {name: given[name] for name in self.options}
        super().__init__(params, options, curvature=curvature, fused=fused, capturable=capturable)

    def _tiles(self, p: Tensor, group: Group) -> list[tuple[Tile, Structures]]:
        return structured_tiles(
            self._pairs.shape_of(p), structure=group["structure"], block_size=group["block_size"]
        )

    def _block_state(
        self, p: Tensor, tile: Tile, structures: Structures, group: Group
    ) -> dict[str, Tensor]:
        return factor_state(p, tile, structures, group, salt=len(self.state))

    def _products(self, p: Tensor, structures: Structures, group: Group) -> torch.dtype:
        return product_dtype(p, structures, group)
