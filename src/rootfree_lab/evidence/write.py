"""From the records under results/ to the page of the documentation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rootfree_lab.evidence.claims import CLAIMS, IF, NETWORKS, WHITE, Claim, Verdict, told
from rootfree_lab.evidence.outcomes import (
    NOTE,
    Case,
    Outcome,
    Topic,
    others,
    outcome,
    peak,
    search_runs,
    state,
    step_milliseconds,
    topics,
)
from rootfree_lab.evidence.sensitivity import Plot, draw, plot
from rootfree_lab.report.configuration import setup
from rootfree_lab.report.experiments import Experiment, Group
from rootfree_lab.report.records import ReportError, Run
from rootfree_lab.report.statistics import Summary
from rootfree_lab.report.tables import Cell, columns
from rootfree_lab.report.templating import templates

NOT_RUN = "not run yet"


@dataclass(frozen=True)
class Judged:
    """A claim with the verdict of every case that it is about; None: not run yet."""

    claim: Claim
    cases: Sequence[tuple[Case, Verdict | None]]

    @property
    def word(self) -> str:
        run = [verdict for _, verdict in self.cases if verdict is not None]
        if not run:
            return NOT_RUN
        held = sum(verdict.holds for verdict in run)
        word = "holds" if held >= self.claim.share * len(run) else "fails"
        word = f"**{word}**" + (" so far" if len(run) < len(self.cases) else "")
        doubtful = sum(bool(verdict.doubt) for verdict in run)
        doubt = f", {doubtful} in doubt" if doubtful else ""
        return f"{word}: {held} of {len(run)} cases{doubt}"

    @property
    def missing(self) -> int:
        return sum(verdict is None for _, verdict in self.cases)


Row = tuple[str, list[str]]  # an optimizer or a network, and the cells of the table
Shown = dict[str, Any]  # one case, for the template


def write_evidence(results: Path, page: Path) -> int:
    """Write the page, and its plots into a folder of the page's name beside it; how many plots.

    Raises:
        ReportError: when there is no folder `results`, or a record in it cannot be read.
    """
    text, plots = render(results, page.stem)
    page.parent.mkdir(parents=True, exist_ok=True)
    for address, found in plots.items():
        draw(found, page.parent / address)
    page.write_text(text, encoding="utf-8", newline="\n")
    return len(plots)


def render(results: Path, folder: str) -> tuple[str, dict[str, Plot]]:
    """The text of the page, and its plots by their address, in `folder`."""
    if not results.is_dir():
        raise ReportError(f"there is no folder {str(results)!r} with results")
    sections = topics()
    cases = [case for topic in sections for case in topic.cases]
    cases += others(results, cases)
    outcomes = {case.config: outcome(results, case) for case in cases}
    judged = [_judged(claim, cases, outcomes) for claim in CLAIMS]
    shown = {
        case.config: _shown(case, outcomes[case.config], results / case.config, folder)
        for case in cases
    }
    text = templates("rootfree_lab.evidence").get_template("evidence.md").render(
        topics=sections,
        shown=shown,
        judged=judged,
        unknown=[case for case in cases if case.kind == "unknown"],
        run=[case for case in cases if outcomes[case.config] is not None],
        missing=[case for case in cases if outcomes[case.config] is None],
        letters={case.config: topic.letter for topic in sections for case in topic.cases},
        begun=[name for name, case in shown.items() if case["rows"] or case["searched"]],
        beside={topic.letter: _beside(topic, outcomes) for topic in sections},
        costs=[
            _cost(case, outcomes[case.config])
            for case in cases
            if case.kind in ("transformer", "cost")
        ],
        switches=[
            _switch(case, there)
            for case in cases
            if case.kind in NETWORKS
            and ((there := outcomes[case.config]) is None or {IF, WHITE} <= {*there.labels})
        ],
    )  # fmt: skip
    return text, {case["address"]: case["plot"] for case in shown.values() if case["plot"]}


def _judged(claim: Claim, cases: Sequence[Case], outcomes: Mapping[str, Outcome | None]) -> Judged:
    found: list[tuple[Case, Verdict | None]] = []
    for case in cases:
        if case.kind not in claim.kinds:
            continue
        there = outcomes[case.config]
        if there is None:
            found.append((case, None))
        elif claim.applies(there):
            found.append((case, claim.judge(there)))
    return Judged(claim, found)


def _shown(case: Case, there: Outcome | None, results: Path, folder: str) -> Shown:
    """What the page shows of a case; without final runs there are no rows."""
    runs = search_runs(results)
    drawn = plot(runs, there.measure if there else case.measure or _measured(runs))
    file = results / NOTE
    shown = {
        "rows": [],
        "searched": len(runs),
        "plot": drawn,
        "address": f"{folder}/{case.config}.svg",
        "note": file.read_text(encoding="utf-8").strip() if file.is_file() else "",
    }
    if there is None:
        return shown
    found = [column for column in columns(there.experiment) if _wanted(column.title, there)]
    rows = [
        (
            group.label,
            [_cell(column.cells.get(group.label)) for column in found]
            + [group.seeds, str(there.trials.get(group.label, 0))],
        )
        for group in there.experiment.groups
    ]
    note = shown["note"]
    if len({there.trials.get(label, 0) for label in there.labels}) > 1:
        note = f"The optimizers did not have the same number of trials. {note}".strip()
    known = [entry for entry in setup(there.experiment) if entry[0] not in ("Seeds", "Software")]
    heads = [*(column.title for column in found), "seeds", "trials"]
    return shown | {"setup": known, "heads": heads, "rows": rows, "note": note}


def _measured(runs: Sequence[Run]) -> str:
    """The metric that decides a search: the test error, or the loss where there is none."""
    return Experiment("", "", (Group("", tuple(runs)),), ()).headline


def _beside(topic: Topic, outcomes: Mapping[str, Outcome | None]) -> list[Row]:
    """The paper's test errors of an experiment, ours beside them."""
    cases = [case for case in topic.cases if case.error]
    rows = []
    for label in dict.fromkeys(label for case in cases for label in case.error):
        cells = []
        for case in cases:
            there = outcomes[case.config]
            ours = there.value(label) if there else None
            cells += [f"{case.error[label]:.2f}", NOT_RUN if ours is None else told(ours)]
        rows.append((label, cells))
    return rows


def _wanted(title: str, there: Outcome) -> bool:
    """Errors, losses, steps and time to AdamW's loss; time and memory of a step on a GPU alone.

    A case of costs has the time and the state of the optimizer wherever it ran.
    """
    if title.startswith(("Test", "Training", "Steps")):
        return True
    if there.case.kind == "cost" and title.startswith(("Optimizer step", "Optimizer state")):
        return True
    return not there.experiment.on_cpu and title.startswith(("Time to", "Optimizer step", "Peak"))


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    mean = f"**{cell.mean}**" if cell.best else cell.mean
    deviation = f" ± {cell.deviation}" if cell.deviation else ""
    return f"{mean}{deviation}" + (f" ({cell.note})" if cell.note else "")


def _cost(case: Case, there: Outcome | None) -> Row:
    """Shampoo over IF-Shampoo: the paper's time, then our optimizer step, state and peak memory."""
    known = all(label in case.minutes for label in ("Shampoo", IF))
    cells = [f"{case.minutes['Shampoo'] / case.minutes[IF]:.1f} ×" if known else "–"]
    on_cpu = there is not None and there.experiment.on_cpu
    for quantity in (step_milliseconds, state, peak):
        pair = [there.of(label, quantity) if there else None for label in ("Shampoo", IF)]
        if on_cpu and quantity is peak:  # of the whole process: more about Python than a method
            cells.append("–")
        else:
            cells.append(_ratio(pair, " on a CPU" if on_cpu and quantity is not state else ""))
    return case.title, cells


def _ratio(pair: Sequence[Summary | None], where: str) -> str:
    above, below = pair
    if above is None or below is None or not below.mean:
        return NOT_RUN
    return f"{above.mean / below.mean:.1f} ×{where}"


def _switch(case: Case, there: Outcome | None) -> Row:
    """Without the root, with it, and whether the difference exceeds the spread over seeds."""
    free, rooted = (there.value(label) if there else None for label in (IF, WHITE))
    if there is None or free is None or rooted is None:
        return case.title, ["–", "–", NOT_RUN]
    cells = [told(value, there.unit) for value in (free, rooted)]
    spread = free.deviation + rooted.deviation
    if not math.isfinite(spread):
        word = "one seed: not decided"
    elif abs(free.mean - rooted.mean) <= spread:
        word = "no difference beyond the spread"
    else:
        word = "yes" if rooted.mean < free.mean else "no"
    return case.title, [*cells, word]
