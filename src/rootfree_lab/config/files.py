"""Config files: tables, overrides of `--set`, and the runs that they describe."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rootfree_lab.config import own_code, settings
from rootfree_lab.config.reading import (
    ConfigError,
    Table,
    assign,
    build,
    check_names,
    checked,
    merged,
    parse_assignment,
    read_toml,
    unknown_name,
)
from rootfree_lab.config.settings import Config, OptimizerConfig

_SECTIONS = {
    "data": settings.DataConfig,
    "model": settings.ModelConfig,
    "schedule": settings.ScheduleConfig,
    "train": settings.TrainConfig,
    "output": settings.OutputConfig,
}
_TOP = ("label", "seeds", *_SECTIONS, "optimizer", "compare", "search")
_ENTRY = ("label", "seeds", *_SECTIONS, "optimizer")


def read_tables(path: Path, assignments: Iterable[str] = ()) -> Table:
    """The tables of a config file with the `--set` assignments applied.

    The command line overrides the file, including its entries.
    """
    tables = copy.deepcopy(read_toml(path))
    _check_entries(tables)
    for text in assignments:
        name, value = parse_assignment(text)
        _assign(tables, name, value)
        _settle_seeds(tables, name)
    _check_entries(tables)
    for each in (tables, *tables.get("compare", [])):
        own_code.make_absolute(each, path.parent)
    return tables


def _check_entries(tables: Table) -> None:
    check_names("the table", tables, _TOP)
    entries = tables.get("compare", [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError("compare must be a list of tables: [[compare]]")
    for entry in entries:
        if not isinstance(entry.get("label"), str):
            raise ConfigError(f"compare: every entry needs a label, got {entry!r}")
        check_names(f"compare.{entry['label']}: the setting", entry, _ENTRY)
    labels = [entry["label"] for entry in entries]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"compare: the label {label!r} is given twice")


def _assign(tables: Table, name: str, value: Any) -> None:
    top, _, rest = name.partition(".")
    check_names(f"--set {name}: the table", [top], _TOP)
    entries = {entry["label"]: entry for entry in tables.get("compare", [])}
    if top != "compare":
        having = [entry for entry in entries.values() if top in entry and top != "label"]
        for table in [tables, *having] if top in tables or not having else having:
            assign(table, name.split("."), value, f"--set {name}")
        return
    for label, entry in entries.items():
        if rest.startswith(f"{label}."):  # a label may have dots in it
            own = rest.removeprefix(f"{label}.").split(".")
            assign(entry, own, value, f"--set {name}")
            return
    raise unknown_name(f"--set {name}: the entry", rest.split(".")[0], entries)


def _settle_seeds(tables: Table, name: str) -> None:
    """`seeds` or `train.seed` on the command line also replaces the other one in the file."""
    for table in (tables, *tables.get("compare", [])):
        if name == "train.seed":
            table.pop("seeds", None)
        elif name == "seeds" and isinstance(table.get("train"), dict):
            table["train"].pop("seed", None)


def config_from(tables: Mapping[str, Any]) -> Config:
    """The settings of a run from its tables; seeds, `compare` and `search` are ignored."""
    for required in ("data", "model", "optimizer", "train"):
        if required not in tables:
            raise ConfigError(f"the table [{required}] is missing")
    optimizer = _optimizer(tables["optimizer"])
    sections: dict[str, Any] = {
        name: build(kind, tables[name], name) for name, kind in _SECTIONS.items() if name in tables
    }
    label = checked("label", tables.get("label", optimizer.name), str)
    if not label.strip():
        raise ConfigError("label must not be empty")
    return Config(label=label, optimizer=optimizer, **sections)


def _optimizer(table: Any) -> OptimizerConfig:
    if not isinstance(table, Mapping) or not isinstance(table.get("name"), str):
        raise ConfigError(f"optimizer must be a table with a name, got {table!r}")
    return OptimizerConfig(table["name"], {k: v for k, v in table.items() if k != "name"})


def load_config(path: Path, assignments: Iterable[str] = (), entry: str | None = None) -> Config:
    """The run that a file describes, or one of its `[[compare]]` entries; its first seed."""
    tables = read_tables(path, assignments)
    entries = {e["label"]: e for e in tables.get("compare", [])}
    if entry is None and (not entries or "optimizer" in tables):
        return _with_first_seed(tables, {}, config_from(tables))
    if entry is None and len(entries) > 1:
        choices = "".join(f"\n  --entry {shlex.quote(label)}" for label in entries)
        raise ConfigError(
            f"{path} has {len(entries)} entries: choose one, or train all with rootfree compare"
            + choices
        )
    chosen = next(iter(entries)) if entry is None else entry
    check_names("the entry", [chosen], entries)
    config = _entry_config(tables, entries[chosen])
    return _with_first_seed(tables, entries[chosen], config)


def load_comparison(path: Path, assignments: Iterable[str] = ()) -> list[Config]:
    """One run per `[[compare]]` entry and seed, in the file's order."""
    tables = read_tables(path, assignments)
    if not tables.get("compare"):
        raise ConfigError(f"{path} has nothing to compare: it needs [[compare]] entries")
    runs: list[Config] = []
    for entry in tables["compare"]:
        config = _entry_config(tables, entry)
        runs += [config.with_seed(seed) for seed in _seeds(tables, entry, config)]
    seen: dict[str, str] = {}
    for run in runs:
        if seen.setdefault(run.identity(), run.label) != run.label:
            raise ConfigError(
                f"compare: {seen[run.identity()]!r} and {run.label!r} have the same settings"
            )
    return runs


def _seeds(tables: Table, entry: Table, config: Config) -> tuple[int, ...]:
    """The seeds of an entry, or else of the base; `train.seed`, if given, must be one of them."""
    given = entry.get("seeds", tables.get("seeds", [config.train.seed]))
    name = f"compare.{entry['label']}.seeds" if "seeds" in entry else "seeds"
    seeds: tuple[int, ...] = checked(name, given, tuple[int, ...])
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ConfigError(f"{name} must be different integers from 0, got {given!r}")
    if _has_one_seed(tables, entry) and config.train.seed not in seeds:
        raise ConfigError(
            f"train.seed is {config.train.seed}, but {name} are {given!r}: give one of the two"
        )
    return seeds


def _has_one_seed(tables: Table, entry: Table) -> bool:
    return any("seed" in table.get("train", {}) for table in (tables, entry))


def _with_first_seed(tables: Table, entry: Table, config: Config) -> Config:
    seeds = _seeds(tables, entry, config)
    return config if _has_one_seed(tables, entry) else config.with_seed(seeds[0])


def _entry_config(tables: Table, entry: Table) -> Config:
    base = dict(tables)
    mine, theirs = base.get("optimizer"), entry.get("optimizer")
    if (
        isinstance(mine, dict)
        and isinstance(theirs, dict)
        and theirs.get("name", mine.get("name")) != mine.get("name")
    ):
        # Another optimizer's options mean something else: they are not inherited.
        del base["optimizer"]
    return config_from(merged(base, entry))
