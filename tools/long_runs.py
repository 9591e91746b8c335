"""Long runs of every matrix method: does the state stay finite, and the factors at one scale?

    python tools/long_runs.py --json docs/reliability/long_runs.jsonl --page docs/reliability.md

Each method has one optimizer with a parameter of every shape and every kind of gradient. It takes
--steps steps of gradients that do not depend on the parameters. Every --look steps the parameters
and the state must be finite, and no factor of a block more than 4 times as large as another.
A method whose run is in the JSON file is not run again. Exit code 1 where a run broke.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rootfree
from rootfree_lab.bench.markdown import Marks, filled, rows

KINDS = ("ordinary", "rank one", "sometimes zero", "jumping")
MARKS = Marks("long runs")
LARGEST_RATIO = 4.0
_STRETCH = 100  # steps of one scale, or of zeros


@dataclass(frozen=True)
class Method:
    """An optimizer, the options beside its defaults, and the shapes to try it on."""

    optimizer: type[rootfree.RootFreeOptimizer]
    options: dict[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ((2, 6), (16, 64), (5, 3, 4), (1, 40))


_B = {"batch_size": 8}
_BF16 = {"factor_dtype": torch.bfloat16, "update_every": 1}
_SMALL = ((2, 6), (4, 16), (5, 3, 4), (1, 40))  # a full matrix of 16x64 elements has 1,024²
METHODS = {
    "IFShampoo": Method(rootfree.IFShampoo, _B),
    "RFShampoo": Method(rootfree.RFShampoo, _B),
    "IFWhitening": Method(rootfree.IFWhitening),
    "RFFullAdagrad": Method(rootfree.RFFullAdagrad, _B, _SMALL),
    "IFFullAdagrad": Method(rootfree.IFFullAdagrad, _B, _SMALL),
    "IFShampoo, bf16, T = 1": Method(rootfree.IFShampoo, {**_B, **_BF16}),
    "IFWhitening, bf16, T = 1": Method(rootfree.IFWhitening, _BF16),
    "RFFullAdagrad, γ = 1": Method(rootfree.RFFullAdagrad, {**_B, "gamma": 1.0}, _SMALL),
    "IFFullAdagrad, γ = 1": Method(rootfree.IFFullAdagrad, {**_B, "gamma": 1.0}, _SMALL),
    "IFFullAdagrad, covariance": Method(
        rootfree.IFFullAdagrad, {**_B, "form": "covariance"}, _SMALL
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What a run has shown."""

    method: str
    steps: int
    broken: str | None  # the first look at which something was not finite, and what
    ratios: dict[str, float | None]  # by kind: the largest ratio of scales; None: one factor


def gradients(kind: str, shape: Sequence[int], steps: int, generator: torch.Generator) -> Tensor:
    """Gradients of so many steps, (steps, *shape), which begin a stretch."""
    G = torch.randn(steps, *shape, generator=generator)
    every = [1] * len(shape)
    stretches = math.ceil(steps / _STRETCH)
    if kind == "rank one":
        G = torch.ones(steps, *every)
        for n, d in enumerate(shape):
            sides = [*every[:n], d, *every[n + 1 :]]
            G = G * torch.randn(steps, *sides, generator=generator)
    elif kind == "sometimes zero":
        # Each step with one half, a quarter of the stretches, and a column for good.
        rare = torch.rand(steps, generator=generator) < 0.5
        idle = (torch.rand(stretches, generator=generator) < 0.25).repeat_interleave(_STRETCH)
        G[rare | idle[:steps]] = 0.0
        G[..., -1] = 0.0
    elif kind == "jumping":
        # Six orders of magnitude from stretch to stretch, and one step in a thousand of 10⁶ more.
        logs = (6 * torch.rand(stretches, generator=generator) - 3).repeat_interleave(_STRETCH)
        outliers = torch.rand(steps, generator=generator) < 1e-3
        sizes = 10.0 ** (logs[:steps] + 6 * outliers)
        G *= sizes.view(-1, *every)
    return G


def scales(state: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Of every stack of blocks the factors' scales, (axes, blocks).

    The scale is the root mean square singular value of K, where S⁻¹ = KKᵀ.
    """
    for stack in sorted({key.split(".")[0] for key in state if ".factor" in key}):
        found = []
        for key in sorted(key for key in state if key.startswith(f"{stack}.factor")):
            inverse = state.get(key.replace("factor", "inverse"))
            if inverse is not None:
                found.append(inverse.double().diagonal(dim1=1, dim2=2).mean(1).sqrt())
            else:
                K = state[key].double()
                found.append((K.flatten(1).square().sum(1) / K.shape[1]).sqrt())
        yield torch.stack(found)


def run(method: str, *, steps: int, look: int = 1000, seed: int = 0) -> Outcome:
    """Take the steps, looking at the state every `look` of them."""
    chosen = METHODS[method]
    cases = [(kind, shape) for kind in KINDS for shape in chosen.shapes]
    params = [nn.Parameter(torch.ones(shape)) for _, shape in cases]
    optimizer = chosen.optimizer(params, **chosen.options)
    generator = torch.Generator().manual_seed(seed)
    largest: dict[str, float | None] = dict.fromkeys(KINDS)
    for start in range(0, steps, look):
        count = min(look, steps - start)
        drawn = [gradients(kind, shape, count, generator) for kind, shape in cases]
        for step in range(count):
            for p, G in zip(params, drawn, strict=True):
                p.grad = G[step]
            optimizer.step()
        for p, (kind, shape) in zip(params, cases, strict=True):
            values = {"parameter": p.detach(), **optimizer.state[p]}
            wrong = [key for key, value in values.items() if not value.isfinite().all()]
            if wrong:
                where = f"step {start + count}: {wrong[0]} of {_name(shape)}, {kind}"
                return Outcome(method, steps, where, largest)
            found = [each for each in scales(optimizer.state[p]) if len(each) > 1]
            ratio = max((float((x.amax(0) / x.amin(0)).max()) for x in found), default=None)
            if ratio is not None:
                largest[kind] = max(ratio, largest[kind] or 0.0)
    return Outcome(method, steps, None, largest)


def healthy(outcome: Outcome) -> bool:
    """Whether everything stayed finite, and the factors at one scale."""
    ratios = [ratio for ratio in outcome.ratios.values() if ratio is not None]
    return outcome.broken is None and all(ratio < LARGEST_RATIO for ratio in ratios)


def table(outcomes: Sequence[Outcome]) -> str:
    """The table of the page."""
    head = ("method", "steps", "finite", *KINDS)
    body = [
        (
            o.method,
            f"{o.steps:,}",
            o.broken or "yes",
            *["one factor" if ratio is None else f"{ratio:.2f}" for ratio in o.ratios.values()],
        )
        for o in outcomes
    ]
    return "\n".join([*rows(head, body), ""])


def read(file: Path | None) -> dict[str, Outcome]:
    """The runs of the file by method; the last one counts."""
    if file is None or not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    return {o.method: o for o in (Outcome(**json.loads(line)) for line in lines)}


def _name(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the file has not got, and write the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--look", type=int, default=1000)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    given = parser.parse_args(arguments)
    if min(given.steps, given.look) < 1:
        parser.error("--steps and --look must be at least 1")
    known = read(given.json)
    for method in given.methods:
        if method not in known or known[method].steps != given.steps:
            known[method] = run(method, steps=given.steps, look=given.look)
            if given.json is not None:
                with given.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(known[method]), ensure_ascii=False) + "\n")
            print(known[method], file=sys.stderr, flush=True)
    outcomes = [known[method] for method in METHODS if method in known]
    print(table(outcomes), end="")
    if given.page is not None:
        given.page.write_text(filled(given.page, table(outcomes), MARKS), encoding="utf-8")
    return 0 if all(map(healthy, outcomes)) else 1


if __name__ == "__main__":
    sys.exit(main())
