"""The page and the LaTeX table: what the templates are given, and their environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from rootfree_lab.report import palette
from rootfree_lab.report.configuration import settings_table, setup
from rootfree_lab.report.curves import AXIS_NAMES
from rootfree_lab.report.experiments import Experiment
from rootfree_lab.report.palette import MOST_DRAWN, Style
from rootfree_lab.report.records import Run
from rootfree_lab.report.runs_table import runs_table
from rootfree_lab.report.statistics import QUARTILES_FROM
from rootfree_lab.report.tables import columns, labels
from rootfree_lab.report.templating import templates

MOST_PROBLEMS = 10  # listed one by one
LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "’": "'", **{c: f"\\{c}" for c in "&%$#_{}"},
}  # fmt: skip


def page(
    title: str,
    runs: Sequence[Run],
    experiments: Sequence[Experiment],
    drawings: Sequence[Mapping[str, Any]],
    looks: Mapping[str, Style],
    repeated: set[str],
    problems: Sequence[str],
    downloads: Mapping[str, str],
) -> str:
    """The whole report as HTML."""
    sections = [
        {
            "experiment": experiment,
            "drawing": drawing,
            "setup": setup(experiment),
            "settings": settings_table(experiment.groups),
            "columns": columns(experiment),
            "caption": _curves_caption(experiment),
        }
        for experiment, drawing in zip(experiments, drawings, strict=True)
    ]
    return _environment().get_template("page.html").render(
        title=title,
        outline=_outline(runs, experiments),
        problems=problems[:MOST_PROBLEMS],
        more_problems=max(0, len(problems) - MOST_PROBLEMS),
        sections=sections,
        labels=labels(experiments),
        looks=looks,
        runs=runs_table(runs, repeated),
        downloads=downloads,
        axis_names=AXIS_NAMES,
        day=palette.DAY,
        night=palette.NIGHT,
    )  # fmt: skip


def latex(experiments: Sequence[Experiment]) -> str:
    """The table of a paper (package booktabs)."""
    environment = _environment().overlay(
        variable_start_string="<<", variable_end_string=">>",
        block_start_string="<%", block_end_string="%>",
    )  # fmt: skip
    parts = [(e, [column for column in columns(e) if column.in_paper]) for e in experiments]
    return environment.get_template("table.tex").render(
        parts=[(experiment, found) for experiment, found in parts if found],
        labels=labels(experiments),
    )


def _environment() -> Environment:
    environment = templates("rootfree_lab.report")
    environment.filters |= {
        "power": lambda number: _power(number.replace("-", "\N{MINUS SIGN}"), "·10<sup>{}</sup>"),
        "latex_power": lambda number: _power(number, r" \cdot 10^{{{}}}"),
        "latex": lambda text: "".join(LATEX.get(c, c) for c in text),
    }
    return environment


def _power(number: str, form: str) -> Markup:
    """A printed number with its exponent as `form` has it, where it has one."""
    digits, marked, exponent = number.partition("e")
    return Markup(digits + form.format(exponent) if marked else number)


def _outline(runs: Sequence[Run], experiments: Sequence[Experiment]) -> str:
    counts = dict.fromkeys(("completed", "diverged", "incomplete"), 0)
    for run in runs:
        counts[run.status] += 1
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''} ({told})"
    several = "s" if len(experiments) != 1 else ""
    return f"{count}, {len(experiments)} experiment{several}."


def _curves_caption(experiment: Experiment) -> str:
    counts = {len(group.runs) for group in experiment.groups}
    text = "Line: median over seeds, as far as half of them reach."
    if max(counts) > 1:
        spread = ["smallest to largest"] if min(counts) < QUARTILES_FROM else []
        if max(counts) >= QUARTILES_FROM:
            spread.append(f"quartiles (from {QUARTILES_FROM} seeds on)")
        text += f" Band: {', or '.join(spread)}."
    if any(group.failed for group in experiment.groups):
        text += " ×: end of a run that failed."
    if len(experiment.groups) > MOST_DRAWN:
        text += f" Drawn are the {MOST_DRAWN} best of {len(experiment.groups)} methods."
    return text
