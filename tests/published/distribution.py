"""The wheel and the source distribution, built once; and an environment with torch alone."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build(source: Path, folder: Path, *targets: str) -> list[Path]:
    """Build a tree with the backend that pyproject.toml names; the files that it wrote."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    chosen = [part for target in targets for part in ("--target", target)]
    subprocess.run([*command, *chosen], cwd=source, check=True, capture_output=True)
    return sorted(folder.iterdir())


def needed_by(name: str) -> set[str]:
    """A package and all that it needs, as far as it is installed here."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        try:
            needs = importlib.metadata.requires(each) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        found.add(each)
        waiting += [re.match(r"[\w.-]+", need)[0] for need in needs if "extra ==" not in need]
    return found


def environment_with_torch_alone(folder: Path) -> Path:
    """A virtual environment in which torch and what it needs can be imported; its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    for name in needed_by("torch"):
        package = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in package.files or () if file.parts[0] != ".."}:
            link = packages / top
            if top != "__pycache__" and not link.exists():
                link.symlink_to(package.locate_file(top))
    return python
