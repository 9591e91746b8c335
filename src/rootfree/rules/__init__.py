"""The equations of the paper as functions on batched tensors.

Letters are the paper's: β₁ `lr`, β₂ `beta2`, α₁ `alpha1`, α₂ `alpha2`, λ `lam`, κ `kappa`,
γ `gamma`, B the number of loss terms that are averaged. A trailing underscore marks a function that
changes its first tensors in place and says which.
"""

# With λ = 0 and no gradient a factor would grow for ever; this stops it at 10¹⁵ for a product of
# factors, far from the end of fp32, and is below rounding wherever there is any curvature.
LEAST_DAMPING = 1e-30

# Gradients are limited to this. Their products with factors then stay in the range of fp32, unless
# the gradients before were below 10⁻¹⁰; beyond it ∞ - ∞ would leave NaN in the state for good.
LARGEST_GRADIENT = 2.0**60
