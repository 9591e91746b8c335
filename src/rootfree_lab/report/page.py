"""The page: one file that needs nothing else, for a screen by day or night and for paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from rootfree_lab.report import palette
from rootfree_lab.report.curves import AXIS_NAMES
from rootfree_lab.report.experiments import Experiment
from rootfree_lab.report.markup import Child, Markup, tag
from rootfree_lab.report.palette import MOST_DRAWN, Style
from rootfree_lab.report.records import Run
from rootfree_lab.report.runs_table import controls, runs_table
from rootfree_lab.report.statistics import QUARTILES_FROM
from rootfree_lab.report.swatch import swatch
from rootfree_lab.report.tables import DASH, Cell, Column, columns, labels, with_power

MOST_PROBLEMS = 10  # listed one by one
RESULTS_CAPTION = (
    "Mean ± standard deviation over the seeds that finished; bold is best. Where runs failed, "
    "their number is given, and only methods with the fewest failures can be best."
)


@dataclass(frozen=True)
class Drawings:
    """The figures of one experiment as SVG."""

    slug: str
    panels: Mapping[str, list[Markup]]  # by axis
    bars: Markup | None


def page(
    title: str,
    runs: Sequence[Run],
    experiments: Sequence[Experiment],
    drawings: Sequence[Drawings],
    looks: Mapping[str, Style],
    repeated: set[str],
    problems: Sequence[str],
) -> str:
    """The whole report as HTML."""
    links = [(f"#{drawing.slug}", e.name) for e, drawing in zip(experiments, drawings, strict=True)]
    links = [("#results", "Results"), *links, ("#runs", "Runs")]
    parts: list[Child] = [
        tag("h1", title),
        tag("p", _outline(runs, experiments), class_="note"),
        _problems(problems),
        tag(
            "nav",
            tag("ul", *(tag("li", tag("a", n, href=to)) for to, n in links)),
            aria_label="Parts",
        ),
        tag("h2", "Results", id="results"),
        _scroll(_paper_table(experiments, looks), "Results"),
        tag("p", RESULTS_CAPTION, class_="note"),
    ]
    for experiment, drawing in zip(experiments, drawings, strict=True):
        parts.append(_section(experiment, drawing, looks))
    parts += [
        tag("h2", "Runs", id="runs"),
        controls(len(runs)),
        _scroll(runs_table(runs, repeated), "Runs"),
        tag(
            "p",
            "Headings sort; the address of the page keeps the order and the filter.",
            class_="note",
        ),
    ]
    # Nothing is loaded from anywhere: the browser is told to refuse it.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(_variables() + _resource("page.css"))),
    )
    script = tag("script", Markup(_resource("page.js")))
    return "<!DOCTYPE html>\n" + tag(
        "html", head, tag("body", tag("main", *parts), script), lang="en"
    )


def _outline(runs: Sequence[Run], experiments: Sequence[Experiment]) -> str:
    counts = dict.fromkeys(("completed", "diverged", "incomplete"), 0)
    for run in runs:
        counts[run.status] += 1
    told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    versions: dict[str, set[str]] = {}
    for run in runs:
        for name, version in run.versions.items():
            versions.setdefault(str(name), set()).add(str(version))
    written = "; ".join(f"{name} {', '.join(sorted(v))}" for name, v in versions.items())
    count = f"{len(runs)} run{'s' if len(runs) != 1 else ''} ({told})"
    several = "s" if len(experiments) != 1 else ""
    outline = f"{count}, {len(experiments)} experiment{several}."
    return f"{outline} {written}." if written else outline


def _problems(problems: Sequence[str]) -> Markup | None:
    if not problems:
        return None
    listed = [tag("li", problem) for problem in problems[:MOST_PROBLEMS]]
    if len(problems) > MOST_PROBLEMS:
        listed.append(tag("li", f"and {len(problems) - MOST_PROBLEMS} more"))
    return tag("div", "Lines that were left out:", tag("ul", *listed), class_="warning")


def _paper_table(experiments: Sequence[Experiment], looks: Mapping[str, Style]) -> Markup:
    parts = [(e, [column for column in columns(e) if column.in_paper]) for e in experiments]
    parts = [(experiment, found) for experiment, found in parts if found]
    if not parts:
        return tag("p", "No run has finished.")
    names = [
        tag("th", e.name, class_="experiment first", scope="colgroup", colspan=str(len(found)))
        for e, found in parts
    ]
    heads = [_head(column, first=place == 0) for _, f in parts for place, column in enumerate(f)]
    rows = []
    for label in labels(experiments):
        cells: list[Child] = []
        for experiment, found in parts:
            failures = _failures(experiment, label)
            for place, column in enumerate(found):
                extra = failures if place == 0 else None
                cells.append(_cell(column.cells.get(label), extra, first=place == 0))
        rows.append(tag("tr", _label(label, looks), *cells))
    top = tag("tr", tag("td"), *names)
    bottom = tag("tr", tag("th", "Optimizer", scope="col"), *heads)
    head, body = tag("thead", top, bottom), tag("tbody", *rows)
    return tag("table", head, body, class_="results")


def _section(experiment: Experiment, drawing: Drawings, looks: Mapping[str, Style]) -> Markup:
    shown = [group for group in experiment.groups if group.label in looks]
    parts: list[Child] = [tag("h2", experiment.name, id=drawing.slug)]
    if experiment.differences:
        names = ", ".join(experiment.differences)
        parts.append(tag("p", f"Not the same in all runs here: {names}.", class_="warning"))
    if drawing.panels:
        legend = [tag("li", swatch(looks[g.label]), tag("span", g.label)) for g in shown]
        parts += [
            tag("ul", *legend, class_="legend", aria_label="Legend"),
            _chooser(drawing),
            *(
                tag("div", *(tag("figure", svg) for svg in svgs), class_=f"panels {axis}")
                for axis, svgs in drawing.panels.items()
            ),
            tag("p", _curves_caption(experiment), class_="note"),
        ]
    if drawing.bars is not None:
        caption = tag(
            "figcaption", "Milliseconds per step, median over runs: the optimizer's of the total."
        )
        parts += [tag("h3", "Time per step"), tag("figure", drawing.bars, caption)]
    parts += [tag("h3", "All results"), _scroll(_detail_table(experiment, looks), experiment.name)]
    return tag("section", *parts, class_="experiment-figures")


def _chooser(drawing: Drawings) -> Markup:
    first = "epoch" if "epoch" in drawing.panels else next(iter(drawing.panels))
    options = [
        tag(
            "label",
            tag(
                "input", type="radio", name=f"axis-{drawing.slug}", value=axis,
                checked=axis == first,
            ),
            AXIS_NAMES[axis],
        )
        for axis in drawing.panels
    ]  # fmt: skip
    return tag("fieldset", tag("legend", "Against"), *options, class_="axes")


def _curves_caption(experiment: Experiment) -> str:
    counts = {len(group.runs) for group in experiment.groups}
    text = "Line: median over seeds, as far as half of them reach."
    if max(counts) > 1:
        spread = [
            "smallest to largest" if min(counts) < QUARTILES_FROM else None,
            f"quartiles (from {QUARTILES_FROM} seeds on)"
            if max(counts) >= QUARTILES_FROM
            else None,
        ]
        text += f" Band: {', or '.join(part for part in spread if part)}."
    if any(group.failed for group in experiment.groups):
        text += " ×: end of a run that failed."
    if len(experiment.groups) > MOST_DRAWN:
        text += f" Drawn are the {MOST_DRAWN} best of {len(experiment.groups)} methods."
    return text


def _detail_table(experiment: Experiment, looks: Mapping[str, Style]) -> Markup:
    found = columns(experiment)
    rows = []
    for group in experiment.groups:
        runs: list[Child] = [str(len(group.finished))]
        if group.failed:
            runs.append(f" of {len(group.runs)}")
        cells = [_cell(column.cells.get(group.label)) for column in found]
        rows.append(
            tag("tr", _label(group.label, looks), *cells, tag("td", *runs, class_="number"))
        )
    heads = [tag("th", "Optimizer", scope="col"), *(_head(column) for column in found)]
    heads.append(tag("th", "Seeds finished", class_="number", scope="col"))
    head, body = tag("thead", tag("tr", *heads)), tag("tbody", *rows)
    return tag("table", head, body, class_="results")


def _head(column: Column, *, first: bool = False) -> Markup:
    title = column.title.replace(", ", ",\N{NO-BREAK SPACE}")  # no unit on a line of its own
    return tag("th", title, class_="number first" if first else "number", scope="col")


def _label(label: str, looks: Mapping[str, Style]) -> Markup:
    return tag(
        "th",
        swatch(looks.get(label)),
        label,
        scope="row",
        class_="long" if len(label) > 30 else None,
    )


def _cell(cell: Cell | None, extra: Markup | None = None, *, first: bool = False) -> Markup:
    name = "number first" if first else "number"
    if cell is None:
        return tag("td", DASH, extra, class_=name)
    mean, spread = (_powered(number) for number in (cell.mean, cell.deviation))
    if cell.best:
        mean = tag("strong", mean)
    deviation = tag("span", Markup(" ± "), spread, class_="deviation") if spread else None
    return tag("td", mean, deviation, extra, class_=name)


def _powered(number: str) -> Markup:
    return Markup(with_power(number, "·10<sup>{}</sup>").replace("-", "\N{MINUS SIGN}"))


def _failures(experiment: Experiment, label: str) -> Markup | None:
    for group in experiment.groups:
        if group.label == label and group.failed:
            text = f"{group.failed} of {len(group.runs)} failed"
            return tag("span", text, class_="failures")
    return None


def _scroll(content: Markup, name: str) -> Markup:
    """A box that scrolls sideways, by keyboard too."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=name)


def _variables() -> str:
    """The colours: by day, by night, and on paper as by day."""
    day = {f"c{number}": colour for number, colour in enumerate(palette.LIGHT)}
    day |= {f"part-{part}": colour for part, (_, colour) in palette.PARTS.items()}
    day |= {
        "ink": palette.INK, "muted": palette.MUTED, "grid": palette.GRID, "paper": "#ffffff",
        "page": "#ffffff", "raised": "#f4f6f8", "line": "#b4bcc6", "chosen": "#e3ebf5",
        "link": "#0b5cad", "warn": "#a8360a",
    }  # fmt: skip
    night = {f"c{number}": colour for number, colour in enumerate(palette.DARK)}
    night |= {f"part-{part}": colour for part, colour in palette.DARK_PARTS.items()}
    night |= {
        "ink": "#e4e7eb", "muted": "#9aa4b0", "grid": "#2b3138", "paper": "#14171b",
        "page": "#14171b", "raised": "#1d2228", "line": "#4b545f", "chosen": "#26364a",
        "link": "#79b8ff", "warn": "#ff9c6b",
    }  # fmt: skip

    def block(values: Mapping[str, str]) -> str:
        return ":root{" + "".join(f"--{name}:{value};" for name, value in values.items()) + "}"

    return f"{block(day)}\n@media screen and (prefers-color-scheme: dark){{{block(night)}}}\n"


def _resource(name: str) -> str:
    return files("rootfree_lab.report").joinpath(name).read_text(encoding="utf-8")
