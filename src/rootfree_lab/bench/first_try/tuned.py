"""What tuning found: the best setting of each optimizer, and the bars that it is held to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from rootfree_lab.bench.first_try.entrants import NAMES
from rootfree_lab.bench.first_try.records import Record
from rootfree_lab.bench.first_try.suite import ALL, data_of
from rootfree_lab.bench.first_try.table import REFERENCE
from rootfree_lab.bench.first_try.verdict import Bar
from rootfree_lab.bench.markdown import rows
from rootfree_lab.bench.table import NOTHING

ROOT_FREE = ("IFShampoo", "RFShampoo", "RFRMSprop", "RFAdamW")


@dataclass(frozen=True)
class Tuned:
    """The setting of an optimizer that was best with seed 0, on every seed that it was run with."""

    optimizer: str
    tried: int  # settings, with seed 0
    best: list[Record]  # by seed

    @property
    def options(self) -> str:
        return self.best[0].label.partition(" ")[2]

    @property
    def scores(self) -> list[float]:
        return [score(r) for r in self.best]


Found = dict[str, dict[str, Tuned]]  # task, optimizer


def score(record: Record) -> float:
    """What a setting is chosen by: validation loss of a language model, else test error."""
    value = record.test_loss if _is_text(record.task) else record.test_error
    return float("inf") if value is None or record.diverged else value


def tuned(records: Sequence[Record]) -> Found:
    """By task and optimizer; of two records of one setting and seed the later counts."""
    found: Found = {}
    for task in (task for task in ALL if task in {r.task for r in records}):
        for name in NAMES:
            mine = [r for r in records if (r.task, r.optimizer) == (task, name)]
            settings = _settings(mine)
            firsts = [(score(runs[0]), key) for key, runs in settings.items() if 0 in runs]
            if firsts:
                best = settings[min(firsts)[1]]
                found.setdefault(task, {})[name] = Tuned(
                    name, len(firsts), [best[seed] for seed in sorted(best)]
                )
    return found


def _settings(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    """Runs of one optimizer by setting and seed.

    Options that some of the records do not have yet came later, and are at their defaults.
    """
    common = set.intersection(*({*r.options} for r in records)) if records else set()
    found: dict[str, dict[int, Record]] = {}
    for r in records:
        options = {name: r.options[name] for name in sorted(common)}
        found.setdefault(json.dumps([options, r.steps]), {})[r.seed] = r
    return found


def shares(mine: Tuned, reference: Tuned) -> list[float | None]:
    """How much of the steps each seed needs to the reference's final training loss."""
    goals = {r.seed: r.final_loss for r in reference.best}
    return [_share(r, goals[r.seed]) for r in mine.best if goals.get(r.seed) is not None]


def _share(record: Record, goal: float | None) -> float | None:
    there = (step for step, loss in record.curve if None not in (loss, goal) and loss <= goal)  # type: ignore[operator]
    first = next(there, None)
    return None if first is None else first / record.steps


def as_markdown(found: Found) -> str:
    """A table a task, and which bars are met."""
    parts = []
    for task, optimizers in found.items():
        measure = "validation loss" if _is_text(task) else "test error"
        head = ("optimizer", "settings tried", "the best", measure, "mean", "training loss")
        body = [_row(each, optimizers.get(REFERENCE)) for each in optimizers.values()]
        body.sort(key=lambda row: row[0])
        steps = next(iter(optimizers.values())).best[0].steps
        heading = f"**`{task}`, {steps:,} steps**"
        goal = (f"steps to {REFERENCE}'s training loss",)
        lines = rows((*head, *goal), [row for _, row in body])
        lines[1] = "|---|---:|---|---|" + "---:|" * 3
        parts.append("\n".join([heading, "", *lines]))
    marked = [
        f"- {bar.label}, {bar.demand}: **{bar.verdict}**" + (f"; {bar.found}" if bar.found else "")
        for bar in bars(found)
    ]
    return "\n\n".join([*parts, "\n".join(marked)])


def _row(mine: Tuned, reference: Tuned | None) -> tuple[float, tuple[str, ...]]:
    text, level = _is_text(mine.best[0].task), mean(mine.scores)
    losses = [r.final_loss for r in mine.best if r.final_loss is not None]
    needed = [] if reference is None else shares(mine, reference)
    said = [NOTHING if each is None else f"{each:.0%}" for each in needed]
    return level, (
        mine.optimizer,
        str(mine.tried),
        mine.options.replace("weight_decay", "decay"),
        ", ".join(_number(each, text=text) for each in mine.scores),
        _number(level, text=text),
        f"{mean(losses):.3g}" if losses else NOTHING,
        ", ".join(said) if said else NOTHING,
    )


def bars(found: Found) -> list[Bar]:
    """What the library asks of its tuned methods beside tuned peers."""
    tasks = ("gpt_sotu", "vit_cifar10", "resnet_cifar10")
    gpt, vit, resnet = (found.get(task, {}) for task in tasks)
    whitening, shampoo = gpt.get("IFWhitening"), gpt.get("IFShampoo")
    transformers = [
        _below("byte GPT: `IFWhitening`", whitening, gpt.get("Muon"), by=0.005),
        _below("byte GPT: `IFWhitening`", whitening, gpt.get("SOAP"), by=0.0),
        _below("byte GPT: `IFShampoo`", shampoo, gpt.get("Muon"), by=0.0),
        _soon("byte GPT: `IFWhitening`", whitening, gpt.get(REFERENCE), most=0.55),
        _below("ViT: `IFWhitening`", vit.get("IFWhitening"), vit.get("Muon"), by=-0.005),
    ]
    root_free = [resnet[name] for name in ROOT_FREE if name in resnet]
    best = min(root_free, key=lambda each: mean(each.scores), default=None)
    label = f"ResNet-18: `{'root-free' if best is None else best.optimizer}`"
    peers = [resnet.get(name) for name in (REFERENCE, "SGD")]
    return transformers + [_below(label, best, peer, by=0.015) for peer in peers]


def _below(label: str, mine: Tuned | None, other: Tuned | None, *, by: float) -> Bar:
    """Whether the mean is at least `by` below the other's, over the seeds that both have."""
    if mine is None or other is None:
        return Bar("", label, "beside a tuned peer", None, 0, "")
    text = _is_text(mine.best[0].task)
    size = f"{abs(by):.3f}" if text else f"{100 * abs(by):.1f} points"
    where = "not above" if by == 0 else f"at least {size} below" if by > 0 else f"within {size} of"
    seeds = sorted({r.seed for r in mine.best} & {r.seed for r in other.best})
    a, b = (mean(score(r) for r in each.best if r.seed in seeds) for each in (mine, other))
    count = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
    found = f"{_number(a, text=text)} against {_number(b, text=text)}, {count}"
    return Bar("", label, f"{where} tuned {other.optimizer}", a <= b - by, 1, found)


def _soon(label: str, mine: Tuned | None, other: Tuned | None, *, most: float) -> Bar:
    demand = f"at {REFERENCE}'s final training loss after at most {most:.0%} of the steps"
    if mine is None or other is None or not (needed := shares(mine, other)):
        return Bar("", label, demand, None, 0, "")
    met = all(each is not None and each <= most for each in needed)
    said = ", ".join("never" if each is None else f"{each:.0%}" for each in needed)
    return Bar("", label, demand, met, 1, said)


def _is_text(task: str) -> bool:
    return data_of(task) == "sotu"


def _number(value: float, *, text: bool) -> str:
    return f"{value:.3f}" if text else f"{value:.1%}"
