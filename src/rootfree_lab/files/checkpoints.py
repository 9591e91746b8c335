"""Checkpoints; a kill at any moment leaves the complete old one or the complete new one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rootfree_lab.config.settings import Config
from rootfree_lab.files.durable import replace_file

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or belongs to another run."""


def file_name(config: Config) -> str:
    """The name of a run's files: its label and seed for people, its identity to be unique."""
    # It cannot lead to another folder, and file systems limit names to 255 bytes.
    name = re.sub(r"[^A-Za-z0-9_.-]+", "_", config.label).strip("._")[:80] or "run"
    return f"{name}-seed{config.train.seed}-{config.identity()}"


def checkpoint_path(out: Path, config: Config) -> Path:
    """Where a run's checkpoint is."""
    return out / "checkpoints" / f"{file_name(config)}.pt"


def kept_path(path: Path, step: int) -> Path:
    """Where a state that a run can go back to is, beside its checkpoint."""
    return path.with_name(f"{path.stem}.step{step}.pt")


def files(path: Path) -> list[Path]:
    """All files of a run's checkpoint: it, states to go back to, leftovers of killed writers."""
    return sorted(path.parent.glob(f"{path.stem}.*"))


def remove(path: Path) -> None:
    """Remove all files of a run's checkpoint."""
    for file in files(path):
        file.unlink(missing_ok=True)


def save(path: Path, config: Config, state: Mapping[str, Any]) -> None:
    """Write a checkpoint; the file is always the complete old or new one."""
    content = {
        "format": FORMAT,
        "identity": config.identity(),
        "config": config.as_table(),
        **state,
    }
    replace_file(path, lambda file: torch.save(content, file))


def load(path: Path, config: Config) -> dict[str, Any]:
    """The state that was saved for exactly this config; that of another config is refused."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise CheckpointError(f"the checkpoint {str(path)!r} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{str(path)!r} is not a checkpoint of this version of the lab")
    if content["identity"] != config.identity():
        differ = ", ".join(differences(content["config"], config.as_table()))
        raise CheckpointError(
            f"the checkpoint {str(path)!r} is of another config (it differs in {differ}): "
            "remove it, or choose another folder with --out"
        )
    return content


def differences(a: Any, b: Any, name: str = "") -> list[str]:
    """Names of the settings in which two config tables differ."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if a == b else [name]
    found: list[str] = []
    for key in sorted({*a, *b}):
        found += differences(a.get(key), b.get(key), f"{name}.{key}" if name else key)
    return found
