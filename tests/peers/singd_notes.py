"""How the published SINGD (`singd.optim.optimizer`, 0.0.5) maps on rule 7 with KFAC curvature.

SINGD is rule 7 for two axes with H = (output-gradient factor) x (input factor) in place of B g gᵀ.
`test_singd_oracle.py` checks the mapping for linear layers, dense and diagonal; the rest is read
from the package. For a layer, the parameter is one matrix of (outputs) x (inputs, and a last column
for the bias); a convolution's kernel is flattened to (out channels) x (in channels * kernel area).
Their C is our first factor, their K our second.

    ours                 theirs         default   note
    lr                   lr             1e-3
    momentum             momentum       0.9       as rule 7: + κW, buffer from zero, no dampening
    weight_decay         weight_decay   0
    damping              damping        1e-3      λ·(tr(CᵀC)/d_C)·KᵀK for K, the mirror image for C
    riemannian_momentum  alpha1         0.5       m <- α₁m + h, *without* our factor (1 - α₂)
    precond_lr           lr_cov         1e-2      number, or callable of the step
    update_every         T              10        steps 0, T, 2T, ...
    batch_size           loss_average   "batch"   the B of the output factor, see below
    factor_norm          -              none      see below

- Curvature. Rows a_i of inputs (with a one for the bias) and g_i of gradients of the *averaged*
  loss by the outputs. Input factor A = Σ a aᵀ / rows; output factor G = B Σ g gᵀ, with B the
  leading size of the output ("batch"), times the number of positions ("batch+sequence"), or 1
  (None: a summed loss). expand: one row per position, rows = examples * positions. reduce: inputs
  averaged and gradients summed over the positions, rows = examples. For convolutions a row is an
  unfolded patch; with channel groups, inputs are averaged over the groups.
- Rule. With H_K = KᵀAK and H_C = CᵀGC, the tangent of K is
  ½(H_K·tr(H_C)/d_C + λ·tr(CᵀC)/d_C·KᵀK - I) and that of C the mirror image: the partial traces
  of rule 7 for this H, both from the old factors; γ is 1.
- Riemannian momentum. Their m is ours divided by (1 - α₂), so that, without normalisation,
  lr_cov = precond_lr·(1 - α₂).
- Normalisation is off by default. `normalize_lr_cov=True` multiplies the new h by (1 - α₁), which
  makes m ours, and divides the rate by max(1, largest absolute entry of m): neither the Frobenius
  norm of the paper nor the spectral norm, so normalised SINGD equals rule 7 for no `factor_norm`.
- `kfac_like=True` drops the coupling by the other factor's traces and the Riemannian momentum
  (IKFAC): not rule 7.
- Accumulated backward passes add to A and to G separately; with each loss divided by their number
  n, A is n times and G 1/n times its average, so that their product comes out right, except under
  `kfac_like`.
- Coverage: Linear and Conv2d; other parameters are not trained (with a warning). Structures, per
  factor (K, C): dense, diagonal, blocks of 30, hierarchical 15/15, lower and upper Toeplitz. The
  defects of the structure classes in `sirfshampoo_runs` (points 4 and 5) hold here too: float64
  is for dense and diagonal only, and block-diagonal factors miss their transposes.
- H_K and H_C are formed by hooks in the forward and backward pass, with the factors as they are
  then (the old ones: `step` replaces them afterwards).
"""
