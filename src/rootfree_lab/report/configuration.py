"""What was run: the setup that all runs of an experiment share, and each method's settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rootfree_lab.report.experiments import Experiment, Group, settings
from rootfree_lab.report.records import Run

# Where a section of a config is told, and the settings that do not belong to a setup.
PLACES = {"data": "Data", "model": "Model", "schedule": "Schedule", "train": "Training"}
UNTOLD = {"train.device", "train.deterministic", "train.graphs"}
NOTHING = ("null", "none", "false", "0", "0.0", "[]", "{}", "")  # settings that are off
PLAIN = {
    "train.epochs": "{} epochs", "train.steps": "{} steps", "train.batch_size": "batch size {}",
    "train.autocast": "{} autocast", "train.loss": "{}",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Settings of the methods: a column for each that several optimizers have, the rest as text."""

    names: Sequence[str]
    rows: Mapping[str, Sequence[str]]  # by label; one longer than names, the last being the rest


def setup(experiment: Experiment) -> list[tuple[str, str]]:
    """The setup of an experiment, as pairs of a heading and a line."""
    runs = [run for group in experiment.groups for run in group.runs]
    # A run that was stopped has other numbers of steps, which nobody has set.
    runs = [run for run in runs if run.status == "completed"] or runs
    found = [(title, _either(_section(run, place) for run in runs))
             for place, title in PLACES.items()]  # fmt: skip
    seeds = sorted({run.seed for run in runs if run.seed}, key=lambda seed: (len(seed), seed))
    found.append(("Seeds", ", ".join(seeds)))
    found.append(("Hardware", _either(str(run.versions.get("device", "")) for run in runs)))
    software = [
        f"{name} {_either(str(run.versions.get(name, '')) for run in runs)}"
        for name in dict.fromkeys(key for run in runs for key in run.versions if key != "device")
    ]
    found.append(("Software", ", ".join(software)))
    return [(title, text) for title, text in found if text]


def optimizer_settings(run: Run) -> dict[str, str]:
    """The settings of a run's optimizer by name, those of a companion as `companion lr`."""
    start = "optimizer."
    found = {
        key.removeprefix(start).replace("companion_options.", "companion "): value
        for key, value in settings(run).items()
        if key.startswith(start)
    }
    return {key: value for key, value in found.items() if key != "name"}


def in_words(found: Mapping[str, str]) -> str:
    """Settings as one line."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def settings_table(groups: Sequence[Group]) -> Settings:
    """The settings of every method of an experiment."""
    tables = {group.label: optimizer_settings(group.runs[0]) for group in groups}
    owners: dict[str, set[str]] = {}
    for group in groups:
        for name in tables[group.label]:
            owners.setdefault(name, set()).add(group.runs[0].optimizer)
    one = len({group.runs[0].optimizer for group in groups}) == 1
    names = [name for name, optimizers in owners.items() if len(optimizers) > 1 or one]
    rows = {
        label: [table.get(name, "") for name in names]
        + [in_words({name: value for name, value in table.items() if name not in names})]
        for label, table in tables.items()
    }
    return Settings(names, rows)


def _section(run: Run, place: str) -> str:
    found = {key: value for key, value in settings(run).items() if key.startswith(f"{place}.")}
    told = []
    for key, value in found.items():
        name = key.removeprefix(f"{place}.").removeprefix("options.").replace("_", " ")
        if value in NOTHING or key in UNTOLD or _unused(key, found):
            continue
        if name == "name":
            told.append(value)
        elif value == "true":
            told.append(name)
        elif key in PLAIN:
            told.append(PLAIN[key].format(value.replace("_", " ")))
        else:
            told.append(f"{name} {value}")
    parameters = run.memory.get("parameters", math.nan)
    if place == "model" and math.isfinite(parameters):
        told.append(f"{int(parameters):,} parameters")
    if place == "train" and run.steps > 0 and "train.steps" not in found:
        told.append(f"{int(run.steps):,} steps")
    return ", ".join(told)


def _unused(key: str, found: Mapping[str, str]) -> bool:
    """Whether a setting says nothing: another makes it idle, as a factor without milestones."""
    if key == "schedule.factor":
        return found.get("schedule.milestones", "[]") == "[]"
    if key in ("train.square_k", "train.square_m"):
        return found[key] == "1.0" or not found.get("train.loss", "").startswith("square")
    return key == "data.crop" and found[key] == "padded"  # the usual one; texts have none


def _either(texts: Iterable[str]) -> str:
    """What is said once; what differs between runs, side by side."""
    return " | ".join(dict.fromkeys(text for text in texts if text))
