"""B·ḡḡᵀ as an estimate of the Fisher matrix, for logistic regression.

With gᵢ the gradient of -log p(yᵢ|xᵢ) and labels drawn from the model, E gᵢ = 0, so that in the
Fisher matrix of the joint distribution of a mini-batch the cross terms vanish:
F_mini = E (Σgᵢ)(Σgᵢ)ᵀ = Σ E gᵢgᵢᵀ. With ḡ = Σgᵢ/B, B·ḡḡᵀ has the expectation F_mini/B, and over
mini-batches that of F/N, F the Fisher matrix of all N examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

import torch
from torch import Tensor

from rootfree.curvature import OuterProducts
from rootfree_lab.verify.claim import Measured, below, claim, relative_difference
from rootfree_lab.verify.draws import normal

# The standard error of the estimates is then about 0.1 %: a B that is off by 1 % shows.
DRAWS = 400_000
CHUNK = 50_000
B, D = 8, 5
SIGMAS = 5.0  # of a hundred thousand seeds about one gives more by chance, for all entries


@dataclass(frozen=True)
class Logistic:
    """Features x (N, d) and p(y = 1|x) of each, (N,)."""

    x: Tensor
    p: Tensor

    @classmethod
    def draw(cls, generator: torch.Generator, *, N: int = 24, d: int = D) -> Logistic:
        x, w = normal(generator, N, d), normal(generator, d)
        return cls(x, torch.sigmoid(x @ w))

    @property
    def fisher(self) -> Tensor:
        """F/N = (1/N) Σ p(1-p)·xxᵀ, the expectation over labels in closed form."""
        return self.x.mT @ ((self.p * (1 - self.p))[:, None] * self.x) / len(self.p)

    def gradients(self, rows: Tensor, y: Tensor) -> Tensor:
        """Per-example gradients (p - y)x of the mini-batches `rows` (b, B): (b, B, d)."""
        return (self.p[rows] - y).unsqueeze(-1) * self.x[rows]


def draw_labels(generator: torch.Generator, p: Tensor) -> Tensor:
    """Labels from the model: y = 1 with probability p."""
    return torch.bernoulli(p, generator=generator)


def curvature(g: Tensor, B: int) -> Tensor:
    """The library's H = B·ḡḡᵀ of a stack of averaged gradients (b, d): (b, d, d)."""
    eye = torch.eye(g.shape[1], dtype=g.dtype)
    (H,) = OuterProducts(g, B).contracted([eye])
    return H


@claim(
    "fisher-joint",
    "The expectation of B·ḡḡᵀ over labels of the model and mini-batches is F/N, exactly.",
)
def joint(generator: torch.Generator) -> Measured:
    """The expectation summed over all mini-batches and all labels: no sampling error."""
    N, B = 6, 3
    model = Logistic.draw(generator, N=N, d=3)
    batches = torch.tensor(list(combinations(range(N), B)))
    labels = torch.tensor(list(product((0.0, 1.0), repeat=B)), dtype=torch.float64)
    rows = batches.repeat_interleave(len(labels), 0)
    y = labels.repeat(len(batches), 1)
    p = model.p[rows]
    probability = torch.where(y == 1, p, 1 - p).prod(1) / len(batches)
    H = curvature(model.gradients(rows, y).mean(1), B)
    expected = (probability[:, None, None] * H).sum(0)
    detail = f"all {len(batches)} mini-batches of {B} out of {N}, all labels"
    return below(relative_difference(expected, model.fisher), 1e-13, detail)


@claim(
    "fisher-monte-carlo",
    "B·ḡḡᵀ of drawn mini-batches with drawn labels is an unbiased estimate of F/N.",
)
def monte_carlo(generator: torch.Generator) -> Measured:
    """Mini-batches and labels drawn: the mean of tr(F⁻¹H)/d is one, and every entry of H is F's."""
    model = Logistic.draw(generator)
    # In the frame where F/N = I all entries are of one size.
    frame = torch.linalg.inv(torch.linalg.cholesky(model.fisher))
    sample = torch.cat([
        frame @ curvature(g.mean(1), B) @ frame.mT
        for g in _mini_batches(generator, model, observed=None)
    ])  # fmt: skip
    traces = sample.diagonal(dim1=-2, dim2=-1).mean(-1)
    estimate, error = _mean_and_error(traces)
    entries, errors = _mean_and_error(sample)
    eye = torch.eye(D, dtype=torch.float64)
    off = max(
        float((estimate - 1).abs() / error), float(((entries - eye).abs() / errors).max())
    )  # in standard errors
    return Measured(
        float(estimate),
        f"1 ± {SIGMAS:g} s.e.",
        off < SIGMAS,
        f"s.e. {float(error):.1e}, {DRAWS:,} mini-batches; worst entry off by {off:.1f} s.e.",
    )


@claim(
    "fisher-cross-terms",
    "Cross terms vanish in expectation with labels from the model, and only then.",
)
def cross_terms(generator: torch.Generator) -> Measured:
    """B·ḡḡᵀ - (1/B)Σgᵢgᵢᵀ, the share of pairs i ≠ j, vanishes with labels from the model alone."""
    model = Logistic.draw(generator)
    inverse = torch.linalg.inv(model.fisher)

    def share(observed: Tensor | None) -> tuple[Tensor, Tensor]:
        found = []
        for g in _mini_batches(generator, model, observed=observed):
            own = g.mT @ g / B
            found.append((inverse @ (curvature(g.mean(1), B) - own)).diagonal(0, 1, 2).mean(-1))
        return _mean_and_error(torch.cat(found))

    # Observed labels that the model finds unlikely: all gradients point away from its weights.
    observed = (model.p < 0.5).double()
    (drawn, error), (fixed, fixed_error) = share(None), share(observed)
    return Measured(
        float(drawn),
        f"0 ± {SIGMAS:g} s.e.",
        bool(drawn.abs() < SIGMAS * error) and bool(fixed.abs() > 2 * SIGMAS * fixed_error),
        f"s.e. {float(error):.1e}; with observed labels {float(fixed):.3f} ± "
        f"{float(fixed_error):.1e}",
    )


@claim(
    "fisher-rank",
    "B·ḡḡᵀ has rank one; the standard empirical Fisher matrix, of as many terms, has not.",
)
def rank(generator: torch.Generator) -> Measured:
    """The rank of B·ḡḡᵀ, and of the standard empirical Fisher matrix of the same mini-batch."""
    model = Logistic.draw(generator)
    rows = torch.arange(B)[None]
    g = model.gradients(rows, draw_labels(generator, model.p[rows]))
    standard = OuterProducts(g.mT / B**0.5).dense()  # several vectors are columns
    joint, of_all = (
        int(torch.linalg.matrix_rank(H[0])) for H in (curvature(g.mean(1), B), standard)
    )
    same = relative_difference(standard[0], g[0].mT @ g[0] / B)
    return Measured(
        joint,
        f"1, standard: {D}",
        (joint, of_all) == (1, D) and same < 1e-13,
        f"d = {D}, B = {B}; rank {of_all} of (1/B)Σgᵢgᵢᵀ",
    )


def _mini_batches(
    generator: torch.Generator, model: Logistic, *, observed: Tensor | None
) -> Iterator[Tensor]:
    """Per-example gradients of `DRAWS` mini-batches of B, without replacement, CHUNK at a time."""
    N = len(model.p)
    for _ in range(DRAWS // CHUNK):
        rows = torch.rand(CHUNK, N, generator=generator).topk(B, dim=1).indices
        y = draw_labels(generator, model.p[rows]) if observed is None else observed[rows]
        yield model.gradients(rows, y)


def _mean_and_error(sample: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over the first axis and its standard error."""
    return sample.mean(0), sample.std(0) / len(sample) ** 0.5
