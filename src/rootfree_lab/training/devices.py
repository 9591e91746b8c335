"""Where a run takes place."""

from __future__ import annotations

import torch

from rootfree_lab.config.reading import ConfigError


def choose_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"train.device must be auto, cpu or cuda, got {name!r}") from error
    if device.type == "meta":
        raise ConfigError("train.device must be auto, cpu or cuda, got 'meta': it has no numbers")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"train.device is {name!r}, but there is no CUDA device here")
    return device
