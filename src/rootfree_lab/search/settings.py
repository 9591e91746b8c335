"""The `[search]` table of a config, and what is to be searched: one entry an optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from rootfree_lab import optimizers
from rootfree_lab.config.files import load_config, read_tables
from rootfree_lab.config.reading import ConfigError, Table, build, plain_options, unknown_name
from rootfree_lab.config.settings import Config, OptimizerConfig, at_least, in_unit_interval, one_of
from rootfree_lab.search.spaces import Settings, Space, as_table, propose, space_of, with_settings
from rootfree_lab.training import checking

MEASURES = ("auto", "test_error", "test_loss", "train_loss")
DRAWS = ("stratified", "independent")
# The narrowed trials that share their ranges: not all of them, since there may be more later.
NARROWED_BLOCK = 4


@dataclass(frozen=True)
class SearchConfig:
    """How an optimizer's settings are searched for; the same for all of a config.

    `trials`: of each optimizer in the wide stage, and in the narrowed one. `measure` is minimised:
    its final value ("auto": the test error, or the test loss where there is no error). `draws`: of
    n wide trials each has another n-th of every range ("stratified"), or any value. `narrow`:
    the share of a range that the second stage keeps around the best, on the range's scale. A trial
    that is among the worst `prune_worst` of its optimizer after the share `prune_after` of its
    steps is given up; 0 gives up none. `spaces`: by label, laid over those of the laboratory.
    """

    trials: tuple[int, ...] = (6, 4)
    seed: int = 0
    measure: str = "auto"
    draws: str = "stratified"
    narrow: float = 0.33
    prune_after: float = 0.5
    prune_worst: float = 0.25
    spaces: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.trials) != 2 or self.trials[0] < 1 or self.trials[1] < 0:
            raise ValueError(
                f"trials must be two counts, at least 1 in the wide stage and 0 in the narrowed "
                f"one, got {list(self.trials)}"
            )
        at_least(0, seed=self.seed)
        one_of("search.measure", self.measure, MEASURES)
        one_of("search.draws", self.draws, DRAWS)
        in_unit_interval(prune_after=self.prune_after, prune_worst=self.prune_worst)
        if not 0 < self.narrow <= 1:
            raise ValueError(f"narrow must be in (0, 1], got {self.narrow!r}")


@dataclass(frozen=True)
class Slot:
    """A trial's place in the search: it is carried out once."""

    label: str
    stage: int  # 1: wide, 2: narrowed
    number: int  # from 0

    @property
    def name(self) -> str:
        """What a person calls the trial."""
        return f"{self.label} {self.stage}.{self.number}"


@dataclass(frozen=True, eq=False)
class Claim:
    """A trial that this process carries out."""

    slot: Slot
    id: int  # of Optuna's trial
    config: Config
    alone: bool


@dataclass(frozen=True)
class Entry:
    """One optimizer of the search."""

    label: str
    config: Config
    space: Space
    search: SearchConfig

    @property
    def slots(self) -> list[Slot]:
        """All trials, the wide stage first."""
        counts = enumerate(self.search.trials, start=1)
        return [Slot(self.label, stage, n) for stage, count in counts for n in range(count)]

    def settings(self, slot: Slot, space: Space) -> Settings:
        """A trial's settings, drawn from the space of its stage: the same ones on every machine."""
        stratified = self.search.trials[0] if slot.stage == 1 else NARROWED_BLOCK
        block = stratified if self.search.draws == "stratified" else 1
        return propose(
            space, f"{self.search.seed}/{self.label}/{slot.stage}", slot.number, block=block
        )

    def trial(self, slot: Slot, settings: Settings) -> Config:
        options = with_settings(self.config.optimizer.options, settings)
        optimizer = OptimizerConfig(self.config.optimizer.name, options)
        return replace(self.config, label=slot.name, optimizer=optimizer)

    def identity(self) -> Table:
        """What makes the search of this entry what it is.

        The machine's own (device, folder of the data) does not. Nor does the number of narrowed
        trials: there may be more of them later.
        """
        config = self.config.as_table()
        del config["data"]["folder"], config["train"]["device"]
        for name in self.space:
            config["optimizer"].pop(name, None)
        search = self.search
        table = {
            "config": config,
            "space": as_table(self.space),
            "wide_trials": search.trials[0],
            "seed": search.seed,
            "measure": search.measure,
            "draws": search.draws,
            "narrow": search.narrow,
        }
        result: Table = json.loads(json.dumps(table))
        return result


def load_entries(path: Path, assignments: Iterable[str] = ()) -> list[Entry]:
    """The entries of a config file: its `[[compare]]` entries, or its one `[optimizer]`."""
    assignments = list(assignments)
    tables = read_tables(path, assignments)
    search = build(SearchConfig, tables.get("search", {}), "search")
    labels = [entry["label"] for entry in tables.get("compare", [])]
    configs = [load_config(path, assignments, label) for label in labels or [None]]
    known = [config.label for config in configs]
    for label, override in search.spaces.items():
        if label not in known:
            raise unknown_name("search.spaces: the entry", label, known)
        if not isinstance(override, dict):
            raise ConfigError(f"search.spaces.{label} must be a table, got {override!r}")
    return [Entry(config.label, config, _space(config, search), search) for config in configs]


def _space(config: Config, search: SearchConfig) -> Space:
    where = f"search.spaces.{config.label}"
    return space_of(config.optimizer.name, search.spaces.get(config.label, {}), where)


def check(entries: Sequence[Entry]) -> None:
    """Raise what would stop a trial later: missing data, unknown settings, values out of range."""
    for entry in entries:
        checking.check(entry.config)
        if entry.search.measure == "test_error" and not checking.classifies(entry.config):
            raise ConfigError(
                f"search.measure must not be 'test_error' for {entry.config.data.name}: its runs "
                "have none"
            )
    check_spaces(entries)


def check_spaces(entries: Iterable[Entry]) -> None:
    """Raise where an optimizer does not take the settings that may be drawn for it."""
    for entry in entries:
        middle = {name: allowed.at(0.5) for name, allowed in entry.space.items()}
        for name, allowed in entry.space.items():
            for value in allowed.ends():
                # Some settings need one another: to blame is one that is wrong alone and among all.
                alone = _refusal(entry, {name: value})
                if alone is not None and _refusal(entry, {**middle, name: value}) is not None:
                    raise ConfigError(
                        f"search.spaces.{entry.label}.{name}: {alone}. If it is not to be drawn, "
                        f'write {name} = "fixed"'
                    ) from alone
        together = _refusal(entry, middle)
        if together is not None:
            raise ConfigError(f"search.spaces.{entry.label}: {together}") from together


def _refusal(entry: Entry, settings: Settings) -> Exception | None:
    """Why the optimizer does not take these settings; None: it does."""
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = entry.trial(Slot(entry.label, 1, 0), settings).optimizer
    try:
        optimizers.build(optimizer.name, net, batch_size=1, **plain_options(optimizer.options))
    except (TypeError, ValueError) as error:
        return error
    return None
