"""Who takes part: the table of all contenders, and the choice from it by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from rootfree_lab.bench.contenders import (
    GRAPH,
    Contender,
    graphed,
    peers,
    rootfree_contenders,
    torch_contenders,
)
from rootfree_lab.config.reading import ConfigError, unknown_name

#: what is measured unless something is asked for, on a processor: eigendecompositions of large
#: matrices take minutes there
DEFAULT_ON_CPU = (
    "torch AdamW fused",
    "torch RMSprop foreach",
    "RFRMSprop",
    "RFAdamW",
    "IFShampoo T=2",
    "sirfshampoo fp32 T=2",
)


def contenders(*, graph: bool = False) -> dict[str, Contender]:
    """All of them by name, peers among them whether installed or not."""
    table: list[Contender] = [*torch_contenders(), *rootfree_contenders(), *peers()]
    if graph:
        table += [graphed(c) for c in table if c.family == "rootfree" and c.on_model is None]
    return {contender.name: contender for contender in table}


def chosen(
    wanted: Sequence[str], unwanted: Sequence[str], *, default: Iterable[str], graph: bool
) -> list[Contender]:
    """The contenders whose names match a pattern, in the order of the patterns.

    Patterns are names, or have * and ?; with `graph` what matches brings its graphed version.
    """
    table = contenders(graph=graph)
    names = list(default) if not wanted else _matching(wanted, table, "--optimizer")
    left_out = set(_matching(unwanted, table, "--without"))
    if graph:
        names += [n + GRAPH for n in names if n + GRAPH in table]
    names = [n for n in dict.fromkeys(names) if n not in left_out]
    if not names:
        raise ConfigError("--without leaves no optimizer to measure")
    return [table[name] for name in names]


def _matching(patterns: Sequence[str], table: Iterable[str], option: str) -> list[str]:
    names: list[str] = []
    for pattern in patterns:
        found = [name for name in table if fnmatchcase(name, pattern)]
        if not found:
            raise unknown_name(f"{option}: the optimizer", pattern, table)
        names += found
    return names
