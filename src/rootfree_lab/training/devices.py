"""The device of a run."""

from __future__ import annotations

import torch

from rootfree_lab.config.reading import ConfigError


def choose_device(name: str, setting: str = "train.device") -> torch.device:
    """The device of this name; `auto` prefers a GPU. Error messages name the `setting`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"{setting} is {name!r}, but there is no CUDA device here")
    try:
        device = torch.device(name)
        torch.zeros((), device=device)
    except (RuntimeError, ImportError) as error:  # unknown, or not in this build of torch
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{setting} must be auto, cpu or cuda, got {name!r} ({reason})"
        ) from error
    if device.type == "meta":
        raise ConfigError(f"{setting} must be auto, cpu or cuda, got 'meta': it has no numbers")
    return device
