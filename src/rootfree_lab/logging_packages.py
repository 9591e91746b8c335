"""The packages that the logs of a run need, named before hours of training find out."""

from __future__ import annotations

from importlib.util import find_spec

from rootfree_lab.config import OutputConfig
from rootfree_lab.config_reading import ConfigError


def check_packages(output: OutputConfig) -> None:
    """Raise where a log is wanted and its package is not installed."""
    for package, wanted in (("tensorboard", output.tensorboard), ("wandb", output.wandb)):
        if wanted and find_spec(package) is None:
            raise ConfigError(
                f"output.{package} needs the package {package}: pip install {package}, "
                "or leave it off"
            )
