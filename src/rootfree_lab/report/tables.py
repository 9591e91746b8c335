"""The table of the paper: methods down, test error, time and memory of each experiment across."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rootfree_lab.report.bars import milliseconds
from rootfree_lab.report.experiments import Experiment
from rootfree_lab.report.records import Run
from rootfree_lab.report.statistics import Summary, summary

DASH = "–"
_LATEX_POWER = r" \cdot 10^{{{}}}"


@dataclass(frozen=True)
class Cell:
    """A value as it is printed: mean, deviation (empty for one seed), and whether it is best."""

    mean: str
    deviation: str
    best: bool


@dataclass(frozen=True)
class Column:
    """One quantity of one experiment: a cell for each group that has it."""

    title: str
    cells: Mapping[str, Cell]  # by the group's label
    in_paper: bool


def columns(experiment: Experiment) -> list[Column]:
    """The quantities that some finished run of the experiment has, smaller being better in all."""

    def final(metric: str) -> Callable[[Run], float]:
        return lambda run: run.final[metric]

    def of(table: str, key: str) -> Callable[[Run], float]:
        return lambda run: getattr(run, table).get(key, math.nan)

    headline = experiment.headline
    wanted: list[tuple[str, Callable[[Run], float], str]] = [
        ("Test error", final("test_error"), "fraction"),
        ("Test loss", final("test_loss"), ""),
        ("Training loss", final("train_loss"), ""),
        ("Time", of("seconds", "total"), "time"),
        ("Optimizer step, ms", lambda run: milliseconds(run, "optimizer"), ""),
        ("Peak memory", of("memory", "peak_bytes"), "bytes"),
        ("Optimizer state", of("memory", "state_bytes"), "bytes"),
    ]
    in_paper = {"Test error": "test_error", "Test loss": "test_loss", "Training loss": "train_loss"}
    found = []
    for title, value, kind in wanted:
        summaries = {g.label: summary(map(value, g.finished)) for g in experiment.groups}
        known = {label: entry for label, entry in summaries.items() if entry.count}
        if known:
            paper = in_paper.get(title) == headline or title in ("Time", "Peak memory")
            found.append(_column(title, kind, known, _eligible(experiment, known), paper))
    return found


def _eligible(experiment: Experiment, known: Mapping[str, Summary]) -> set[str]:
    """The groups that may be best: those with the fewest failures, as survivors flatter a mean."""
    failed = {group.label: group.failed for group in experiment.groups if group.label in known}
    return {label for label, count in failed.items() if count == min(failed.values())}


def _column(
    title: str, kind: str, known: Mapping[str, Summary], eligible: set[str], in_paper: bool
) -> Column:
    means = [entry.mean for entry in known.values()]
    factor, unit = _unit(kind, max(means))
    form = _fixed(2) if kind == "fraction" else _form([mean * factor for mean in means])

    def text(value: float) -> str:
        return form(value * factor) if math.isfinite(value) else ""

    printed = {label: text(entry.mean) for label, entry in known.items()}
    # Compared as printed: of two equal numbers in a table neither is better.
    lowest = min(float(printed[label]) for label in eligible)
    cells = {
        label: Cell(
            mean=printed[label],
            # Memory that is the same in every run needs no ± 0.00.
            deviation=text(entry.deviation) if entry.deviation > 1e-12 * entry.mean else "",
            best=label in eligible and float(printed[label]) == lowest and len(known) > 1,
        )
        for label, entry in known.items()
    }
    return Column(f"{title}, {unit}" if unit else title, cells, in_paper)


def _unit(kind: str, largest: float) -> tuple[float, str]:
    if kind == "fraction":
        return 100.0, "%"
    if kind == "time":
        units = [(3600.0, "h"), (60.0, "min"), (1.0, "s")]
        return next(((1 / size, name) for size, name in units if largest >= 2 * size), (1.0, "s"))
    if kind == "bytes":
        powers = [(2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB")]
        return next(((1 / size, name) for size, name in powers if largest >= size), (1.0, "B"))
    return 1.0, ""


def _form(means: Sequence[float]) -> Callable[[float], str]:
    """As many decimals for all as show three digits of the smallest mean.

    Where that would be more than six, three digits of each number, small ones with an exponent.
    """
    smallest = min((abs(mean) for mean in means if mean), default=1.0)
    decimals = max(0, 2 - math.floor(math.log10(smallest)))
    return _fixed(decimals) if decimals <= 6 else _three_digits


def _fixed(decimals: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{decimals}f}"


def _three_digits(value: float) -> str:
    if abs(value) >= 1e-3 or value == 0:
        return f"{value:#.3g}".rstrip(".")
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits}e{int(exponent)}"


def with_power(number: str, form: str) -> str:
    """A printed number with its exponent as `form` has it, where it has one."""
    digits, marked, exponent = number.partition("e")
    return digits + form.format(exponent) if marked else number


def labels(experiments: Sequence[Experiment]) -> list[str]:
    """All labels of all experiments, each once, in the order in which they come."""
    return list(dict.fromkeys(group.label for e in experiments for group in e.groups))


def latex(experiments: Sequence[Experiment]) -> str:
    """The table of the paper for LaTeX (package booktabs)."""
    parts = [(e, [column for column in columns(e) if column.in_paper]) for e in experiments]
    parts = [(experiment, found) for experiment, found in parts if found]
    count = sum(len(found) for _, found in parts)
    heads = [rf"\multicolumn{{{len(found)}}}{{c}}{{{_latex(e.name)}}}" for e, found in parts]
    rules, start = [], 2
    for _, found in parts:
        rules.append(rf"\cmidrule(lr){{{start}-{start + len(found) - 1}}}")
        start += len(found)
    lines = [
        "% needs \\usepackage{booktabs}; mean and standard deviation over seeds, best in bold",
        rf"\begin{{tabular}}{{l{'r' * count}}}",
        r"\toprule",
        " & ".join(["", *heads]) + r" \\",
        *([" ".join(rules)] if rules else []),
        " & ".join(["Optimizer", *(_latex(c.title) for _, found in parts for c in found)]) + r" \\",
        r"\midrule",
    ]
    for label in labels(experiments):
        cells = [_latex_cell(column.cells.get(label)) for _, found in parts for column in found]
        lines.append(" & ".join([_latex(label), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex_cell(cell: Cell | None) -> str:
    if cell is None:
        return "--"
    mean, deviation = (with_power(n, _LATEX_POWER) for n in (cell.mean, cell.deviation))
    mean = rf"\mathbf{{{mean}}}" if cell.best else mean
    if not deviation:
        return f"${mean}$"
    return rf"${mean} \pm {deviation}$"


def _latex(text: str) -> str:
    special = {
        "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "<": r"\textless{}", ">": r"\textgreater{}", **{c: f"\\{c}" for c in "&%$#_{}"},
    }  # fmt: skip
    return "".join(special.get(c, c) for c in text)
