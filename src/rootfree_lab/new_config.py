"""`rootfree new`: a commented config to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from rootfree_lab.config_reading import ConfigError


def write_new(path: Path) -> None:
    """Write the config; a file that is there is left alone."""
    text = (files("rootfree_lab") / "new_config.toml").read_text(encoding="utf-8")
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{str(path)!r} is there already: choose another name") from error
