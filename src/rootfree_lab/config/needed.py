"""Checks for packages that a command or a setting needs, before hours of training."""

from __future__ import annotations

from importlib.util import find_spec

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.config.settings import OutputConfig


def need(what: str, module: str, install: str = "rootfree[lab]", otherwise: str = "") -> None:
    """Raise if `module` is not installed; `what` needs it, and pip installs it with `install`."""
    if find_spec(module) is None:
        raise ConfigError(f"{what} needs {module}: pip install '{install}'{otherwise}")


def check_packages(output: OutputConfig) -> None:
    """Raise if a log is wanted and its package is not installed."""
    for package, wanted in (("tensorboard", output.tensorboard), ("wandb", output.wandb)):
        if wanted:
            need(f"output.{package}", package, package, ", or leave it off")
