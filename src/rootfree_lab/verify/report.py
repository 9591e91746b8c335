"""Measuring claims, and showing what came out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module

import torch
from rich.table import Table

import rootfree
from rootfree_lab.config.reading import check_names
from rootfree_lab.verify.claim import REGISTERED, Claim, Measured

_FAMILIES = (
    "fisher", "gaussian", "invariances", "directions", "covariance", "first_order", "equalities",
    "precision", "states", "whitening",
)  # fmt: skip
#: All claims, by name, in the order in which they are told.
CLAIMS = {
    claim.name: claim
    for family in _FAMILIES
    for claim in REGISTERED[import_module(f"rootfree_lab.verify.{family}").__name__]
}
Result = tuple[Claim, Measured]


def chosen(names: Sequence[str]) -> list[Claim]:
    """The claims of these names in the order of the table; all of them for no names.

    Raises:
        ValueError: for a name that is not there; it tells the nearest one that is.
    """
    check_names("the claim", names, CLAIMS)
    return [claim for claim in CLAIMS.values() if not names or claim.name in names]


def measure(claims: Iterable[Claim], *, seed: int) -> Iterator[Result]:
    """Measure one claim after another; each starts at the seed, whichever others are measured."""
    for claim in claims:
        with _one_thread():
            measured = claim.measure(torch.Generator().manual_seed(seed))
        yield claim, measured


@contextmanager
def _one_thread() -> Iterator[None]:
    """A dozen numbers at a time: threads would wait for each other longer than they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def row(claim: Claim, measured: Measured) -> tuple[str, str, str, str]:
    """Name, figure, bar, verdict."""
    verdict = "pass" if measured.passed else "FAIL"
    return claim.name, f"{measured.figure:.4g}", measured.bar, verdict


def line(claim: Claim, measured: Measured) -> str:
    """One claim as a line of plain text."""
    name, figure, bar, verdict = row(claim, measured)
    width = max(map(len, CLAIMS))
    return f"{verdict}  {name:<{width}}  {figure:>11}  {bar:<12}  {measured.detail}"


def as_table(results: Sequence[Result]) -> Table:
    """One claim a row."""
    table = Table(title="Claims, measured in float64 on the library")
    for heading in ("claim", "figure", "bar", ""):
        table.add_column(heading, justify="right" if heading == "figure" else "left", no_wrap=True)
    table.add_column("what was measured")
    for claim, measured in results:
        name, figure, bar, verdict = row(claim, measured)
        colour = "green" if measured.passed else "bold red"
        table.add_row(name, figure, bar, f"[{colour}]{verdict}[/]", measured.detail)
    return table


def as_json(results: Sequence[Result], *, seed: int) -> str:
    """All that was measured, with the versions it was measured on."""
    claims = [
        {
            "name": claim.name,
            "sentence": claim.sentence,
            **asdict(measured),
            # JSON has no word for what is not a number.
            "figure": measured.figure if math.isfinite(measured.figure) else None,
        }
        for claim, measured in results
    ]
    content = {
        "rootfree": rootfree.__version__,
        "torch": torch.__version__,
        "seed": seed,
        "passed": all(measured.passed for _, measured in results),
        "claims": claims,
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
