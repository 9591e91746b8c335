"""All claims, by name: the sentence, and the function that measures it."""

from __future__ import annotations

from functools import partial

from rootfree_lab.verify import (
    covariance,
    directions,
    equalities,
    first_order,
    fisher,
    gaussian,
    invariances,
    methods,
    precision,
    states,
    whitening,
)
from rootfree_lab.verify.claim import Claim

_SCALED = {
    "rf-rmsprop": methods.RF_RMSPROP,
    "rf-adagrad": methods.RF_ADAGRAD,
    "rf-full": methods.RF_FULL,
    "if-covariance": methods.IF_COVARIANCE,
    "if-factor": methods.IF_FACTOR,
    "rf-shampoo": methods.RF_SHAMPOO,
    "if-shampoo": methods.IF_SHAMPOO,
}
_TRANSFORMED = {
    "rf-rmsprop": (methods.RF_RMSPROP, "a diagonal A"),
    "rf-adagrad": (methods.RF_ADAGRAD, "a diagonal A"),
    "rf-full": (methods.RF_FULL, "any A"),
    "if-covariance": (methods.IF_COVARIANCE, "any A"),
    "if-factor": (methods.IF_FACTOR, "any A"),
    "rf-shampoo": (methods.RF_SHAMPOO, "a Kronecker product E ⊗ F"),
    "if-shampoo": (methods.IF_SHAMPOO, "a Kronecker product E ⊗ F"),
}
_EQUIVALENT = {
    "if-covariance": (methods.IF_COVARIANCE, methods.RF_FULL),
    "if-factor": (methods.IF_FACTOR, methods.RF_FULL),
    "if-shampoo": (methods.IF_SHAMPOO, methods.RF_SHAMPOO),
}

_ALL = (
    Claim(
        "fisher-joint",
        "The expectation of B·ḡḡᵀ over labels of the model and mini-batches is F/N, exactly.",
        fisher.joint,
    ),
    Claim(
        "fisher-monte-carlo",
        "B·ḡḡᵀ of drawn mini-batches with drawn labels is an unbiased estimate of F/N.",
        fisher.monte_carlo,
    ),
    Claim(
        "fisher-cross-terms",
        "Cross terms vanish in expectation with labels from the model, and only then.",
        fisher.cross_terms,
    ),
    Claim(
        "fisher-rank",
        "B·ḡḡᵀ has rank one; the standard empirical Fisher matrix, of as many terms, has not.",
        fisher.rank,
    ),
    Claim(
        "gaussian-identities",
        "∂E ℓ/∂μ = E ∇ℓ and 2·∂E ℓ/∂S⁻¹ = E ∇²ℓ over a Gaussian with covariance S⁻¹.",
        gaussian.identities,
    ),
    Claim(
        "gaussian-step",
        "RF full matrix: a step of S is one of natural-gradient descent over the Gaussian.",
        gaussian.full_step,
    ),
    Claim(
        "gaussian-blocks",
        "S = S_C ⊗ S_K: Fisher's matrix is singular, its blocks are -d/2·∂S_C⁻¹/∂S_C and alike.",
        gaussian.fisher_blocks,
    ),
    Claim(
        "gaussian-local",
        "The local coordinates C·exp(η/√2d) are orthonormal.",
        gaussian.local_coordinates,
    ),
    Claim(
        "chain-rule",
        "RF-Shampoo: any H is projected on its factors by the chain rule.",
        gaussian.chain_rule,
    ),
    Claim(
        "chain-rule-structures",
        "IF-Shampoo: a step of a factor of any structure is one of natural-gradient descent.",
        gaussian.structured_step,
    ),
    *(
        Claim(
            f"scale-{name}",
            f"{method.name}: averaged and summed losses give one trajectory.",
            partial(invariances.scale, method=method),
        )
        for name, method in _SCALED.items()
    ),
    Claim(
        "scale-from-gradient",
        "IF-Shampoo started from the gradient's size: the same, with nothing to set.",
        invariances.scale_from_the_gradient,
    ),
    Claim(
        "scale-needs-batch-size",
        "With B left out the trajectory is another, for every one of these methods.",
        partial(invariances.needs_batch_size, methods=tuple(_SCALED.values())),
    ),
    *(
        Claim(
            f"affine-{name}",
            f"{method.name}: the trajectory in p = A q is that in p, for {which}.",
            partial(invariances.affine, method=method),
        )
        for name, (method, which) in _TRANSFORMED.items()
    ),
    Claim(
        "affine-limits",
        "Diagonal and Kronecker preconditioners are not invariant to more than that.",
        invariances.affine_limits,
    ),
    Claim(
        "affine-root-breaks",
        "The worked example: a = 2b after a step without the root, and not with it.",
        invariances.worked_example,
    ),
    Claim(
        "bounded-direction",
        "RF-RMSProp: the direction stays bounded when the gradient vanishes, or explodes.",
        directions.bounded,
    ),
    Claim(
        "root-scale",
        "With the root, directions do not depend on the loss's scale, but s is then no curvature.",
        directions.root_and_scale,
    ),
    Claim(
        "woodbury",
        "The rank-one formula gives the inverse of S.",
        equalities.woodbury,
    ),
    Claim(
        "positive-definite",
        "The covariance form keeps S⁻¹ positive definite for any β₂ (at least half the old one).",
        covariance.positive_definite,
    ),
    Claim(
        "covariance-square",
        "The covariance form is ½A[I + (I-β₂N)(I-β₂N)ᵀ]Aᵀ, N = AᵀHA - γI.",
        covariance.square,
    ),
    Claim(
        "covariance-rank-one",
        "The covariance form in O(d²) for H = B·ggᵀ is the general one.",
        covariance.rank_one,
    ),
    *(
        Claim(
            f"first-order-{name}",
            f"{method.name} is {exact.name} to first order in β₂.",
            partial(first_order.same_to_first_order, method=method, exact=exact),
        )
        for name, (method, exact) in _EQUIVALENT.items()
    ),
    Claim(
        "truncation",
        "K(I - β₂m) is K·exp(-β₂m) to first order in β₂.",
        first_order.truncation,
    ),
    Claim(
        "one-factor",
        "IF-Shampoo with one factor is the factor form of the full-matrix method.",
        equalities.one_factor,
    ),
    Claim(
        "one-axis",
        "RF-Shampoo with one axis is the full-matrix method.",
        equalities.one_axis,
    ),
    Claim(
        "batched-blocks",
        "b blocks in one batched call are b separate calls.",
        equalities.batched_blocks,
    ),
    *(
        Claim(
            f"bf16-{norm}",
            f"With bf16 products and the {norm} norm the factors keep to float32 within 2 %.",
            partial(precision.bf16_factors, norm=norm),
        )
        for norm in ("frobenius", "spectral")
    ),
    Claim(
        "bf16-structures",
        "So do factors of other structures, with bf16 products.",
        precision.bf16_structures,
    ),
    Claim(
        "bf16-stored",
        "Factors that are kept in bf16, rounded stochastically, move as those in float32 do.",
        precision.bf16_stored,
    ),
    Claim(
        "positive-definite-state",
        "The preconditioners that the optimizers keep in float32 are positive definite.",
        states.positive_definite,
    ),
    Claim(
        "balance-blocks",
        "The scales of 100,000 blocks' factors leave no trace in a step, not a bit.",
        states.balance_of_blocks,
    ),
    Claim(
        "balance",
        "Factors whose scales are far apart come back to one scale, and no bit of a step changes.",
        whitening.balance,
    ),
    Claim(
        "whitening-scale",
        "IF-Whitening: the trajectory does not depend on the scale of the loss.",
        whitening.scale,
    ),
    Claim(
        "whitening-orthogonal",
        "IF-Whitening: the trajectory in Q p Rᵀ is that in p, for orthogonal Q and R.",
        whitening.orthogonal,
    ),
    Claim(
        "whitening-fixed-point",
        "IF-Whitening: P H P = I where it has come to rest.",
        whitening.fixed_point,
    ),
    Claim(
        "whitening-first-order",
        "IF-Whitening is Shampoo with the root, by eigendecomposition, to first order in β₂.",
        whitening.first_order,
    ),
    Claim(
        "whitening-positive-definite",
        "IF-Whitening: P is positive definite for any gradients and any β₂ up to 1.",
        whitening.positive_definite,
    ),
)

CLAIMS: dict[str, Claim] = {claim.name: claim for claim in _ALL}
