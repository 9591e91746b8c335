"""From records to a folder with the page, the figures and the table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rootfree_lab.files.durable import replace_text
from rootfree_lab.report import bars, curves
from rootfree_lab.report.experiments import Experiment, arrange
from rootfree_lab.report.export import as_csv, of_run, points
from rootfree_lab.report.figures import inline, save, style
from rootfree_lab.report.page import latex, page
from rootfree_lab.report.palette import Style, styles
from rootfree_lab.report.records import ReportError, read

PAGE, TABLE, FIGURES = "report.html", "table.tex", "figures"
RUNS, POINTS = "runs.csv", "curves.csv"
DOWNLOADS = {
    RUNS: "all runs, with their settings",
    POINTS: "all points of all curves",
    TABLE: "the table of results for LaTeX",
}


@dataclass(frozen=True)
class Report:
    """What was written, and the lines of the records that could not be used."""

    page: Path
    figures: tuple[Path, ...]
    runs: int
    problems: tuple[str, ...]


def write_report(source: Path, out: Path | None = None) -> Report:
    """Write the report of a records file, or of all in a folder, into `out` (default: beside it).

    Raises:
        ReportError: when there are no records, or matplotlib is not installed.
    """
    runs, problems = read(source)
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ReportError("the figures need matplotlib: pip install 'rootfree[lab]'") from error
    out = out or (source if source.is_dir() else source.parent) / "report"
    try:
        (out / FIGURES).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"cannot write to {str(out)!r}: {error.strerror}") from error
    experiments, repeated = arrange(runs)
    shown = [group.label for experiment in experiments for group in curves.drawn(experiment)]
    looks = styles(shown)
    written: list[Path] = []
    drawings = []
    with style():
        for experiment, slug in zip(experiments, _slugs(experiments), strict=True):
            drawing, files = _drawings(experiment, out / FIGURES, slug, looks)
            drawings.append(drawing)
            written += files
    title = "Optimizers compared" if len(shown) > 1 else "Training report"
    text = page(title, runs, experiments, drawings, looks, repeated, problems, DOWNLOADS)
    _write(out / TABLE, latex(experiments))
    _write(out / RUNS, as_csv(map(of_run, runs)))
    _write(out / POINTS, as_csv(row for run in runs for row in points(run)))
    _write(out / PAGE, text)
    return Report(out / PAGE, tuple(written), len(runs), tuple(problems))


def _drawings(
    experiment: Experiment, folder: Path, slug: str, looks: Mapping[str, Style]
) -> tuple[dict[str, Any], list[Path]]:
    """The figures of an experiment: those of the page by axis, and the files, written."""
    metrics, axes = curves.panels(experiment)
    files: list[Path] = []
    if metrics:
        files += save(curves.grid(experiment, metrics, axes, looks), folder / f"{slug}-curves")
        # The one panel that goes into a column of a paper.
        headline = experiment.headline if experiment.headline in metrics else metrics[-1]
        axis = "epoch" if "epoch" in axes else axes[0]
        one = curves.grid(experiment, [headline], [axis], looks)
        files += save(one, folder / f"{slug}-{headline.replace('_', '-')}")
    panels = {
        axis: [
            inline(
                curves.panel(experiment, axis, metric, looks),
                name=f"{slug}-{axis}-{metric}",
                description=f"{curves.METRIC_NAMES[metric]} against "
                f"{curves.AXIS_NAMES[axis].lower()}, {experiment.name}",
            )
            for metric in metrics
        ]
        for axis in axes
    }
    bar, drawn = bars.figure(curves.drawn(experiment)), None
    if bar is not None:
        files += save(bar, folder / f"{slug}-time-per-step")
        description = f"Time per step of each optimizer, {experiment.name}"
        drawn = inline(bar, name=f"{slug}-time", description=description)
    by_stem: dict[str, list[str]] = {}
    for file in files:
        stem = file.stem.removeprefix(f"{slug}-").replace("-", " ")
        by_stem.setdefault(stem, []).append(f"{FIGURES}/{file.name}")
    return {"slug": slug, "panels": panels, "bars": drawn, "files": by_stem}, files


def _slugs(experiments: Sequence[Experiment]) -> list[str]:
    """A name for each experiment that is safe in file names and in addresses, none twice."""
    slugs: list[str] = []
    for experiment in experiments:
        text = f"{experiment.data}-{experiment.model}".lower()
        stem = re.sub(r"[^a-z0-9]+", "-", text).strip("-")[:60] or "experiment"
        slug, number = stem, 2
        while slug in slugs:
            slug, number = f"{stem}-{number}", number + 1
        slugs.append(slug)
    return slugs


def _write(file: Path, text: str) -> None:
    """All or nothing: a page that is open in a browser is never half a page."""
    # A lone surrogate, which JSON can hold and UTF-8 cannot, becomes a question mark.
    replace_text(file, text, errors="replace")
