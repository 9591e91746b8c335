"""Weights of a trained model in a file, saved at the end of a run and loaded to start another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.config.settings import Config
from rootfree_lab.files.checkpoints import file_name
from rootfree_lab.files.durable import remove_leftovers, replace_file


def weights_path(out: Path, config: Config) -> Path:
    """Where the weights of a run are saved."""
    return out / "weights" / f"{file_name(config)}.pt"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a model's state; the file is always the complete old or new one.

    Only the process that has the run's lock may call this.
    """
    replace_file(path, lambda file: torch.save(state, file))
    remove_leftovers(path)


def load_(model: nn.Module, path: Path, fresh: Sequence[str]) -> None:
    """Load a file into the model, except for the parts that `fresh` names.  Changes `model`.

    A name in `fresh` is that of a parameter, a buffer, or a module with some of them.
    """
    state = model.state_dict()
    new = {name for name in state if any(_is_in(name, part) for part in fresh)}
    for part in fresh:
        if not any(_is_in(name, part) for name in state):
            raise ConfigError(f"model.fresh: the model has nothing of the name {part!r}")
    saved = {k: v for k, v in _read(path).items() if not any(_is_in(k, part) for part in fresh)}
    for name in [*state, *saved]:
        if name in new:
            continue
        mine, theirs = _shape(state, name), _shape(saved, name)
        if mine != theirs:
            raise ConfigError(
                f"model.weights: {name} is {mine} in the model and {theirs} in {str(path)!r}; "
                "name it in model.fresh to start it anew"
            )
    model.load_state_dict(saved, strict=False)


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _shape(state: dict[str, Any], name: str) -> str:
    return "x".join(map(str, state[name].shape)) or "one number" if name in state else "missing"


def _read(path: Path) -> dict[str, Any]:
    check(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise ConfigError(f"model.weights: {str(path)!r} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise ConfigError(f"model.weights: {str(path)!r} is not the state of a model")
    return content


def check(path: Path) -> None:
    """Raise if there is no such file."""
    if not path.is_file():
        raise ConfigError(f"model.weights: there is no file {str(path)!r}")
