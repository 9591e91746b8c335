"""What this project is installed with: licences, known vulnerabilities, hashes.

    python tools/audit.py               licences and vulnerabilities of what is installed here
    python tools/audit.py --hashes      downloads what constraints.txt names, and compares hashes

Exit code 1 where something is wrong. Without a network, vulnerabilities are said to be unchecked.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS, LOCK = ROOT / "constraints.txt", ROOT / "constraints.lock"

# Licences that let anybody use this project under its own licence (MIT). Words of an expression.
ALLOWED = re.compile(
    r"0BSD|(The )?3-Clause BSD License|Apache([ -]2(\.0)?)?( License| Software License)?|"
    r"BSD([ -][23]-Clause)?( License)?|BSL-1\.0|CC0-1\.0|CNRI-Python|ISC( License( \(ISCL\))?)?|"
    r"LLVM-exception|MIT(-CMU)?( License)?|MPL-2\.0|Mozilla Public License 2\.0 \(MPL 2\.0\)|"
    r"PSF-2\.0|Python Software Foundation License|Unlicense|Zlib"
)
# Packages that come from the maker of a GPU with a build of torch, under its terms.
OF_THE_DEVICE = re.compile(r"nvidia-.*|cuda-.*")
DATABASE = "https://api.osv.dev/v1/querybatch"
# Builds for one kind of device have a version such as 2.13.0+cpu, and hashes of their own.
BUILT_FOR_DEVICES = ("torch", "torchvision", "triton")


def licence(metadata: importlib.metadata.PackageMetadata) -> str:
    """What a package says of its licence: an expression, else a classifier, else a short text."""
    expression = metadata.get("License-Expression")
    if expression:
        return str(expression)
    classified = [c for c in metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    named = [c.rpartition(" :: ")[2] for c in classified if c != "License :: OSI Approved"]
    return " OR ".join(named) or str(metadata.get("License") or "").strip()


def is_allowed(text: str) -> bool:
    """Whether a licence expression is allowed: all its parts, or one alternative of each."""
    if ALLOWED.fullmatch(text):
        return True
    inner = re.sub(r"\(([^()]*)\)", lambda found: "MIT" if is_allowed(found[1]) else "other", text)
    return any(
        all(ALLOWED.fullmatch(part) for part in re.split(" AND | WITH ", choice))
        for choice in inner.split(" OR ")
    )


def installed() -> list[importlib.metadata.Distribution]:
    """Packages of this environment: not those that a package brings along for itself."""
    folders = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    return list(importlib.metadata.distributions(path=sorted(folders)))


def licences() -> list[str]:
    """A line for every installed package whose licence is not allowed."""
    found = []
    for package in installed():
        text = licence(package.metadata)
        if not is_allowed(text) and not OF_THE_DEVICE.fullmatch(package.name):
            shown = text.splitlines()[0] if text else "none"
            found.append(f"{package.name} {package.version}: the licence {shown!r} is not allowed")
    return sorted(found)


def vulnerabilities(packages: Iterable[tuple[str, str]]) -> list[str]:
    """A line for every package with a known vulnerability; OSError without the database."""
    asked = sorted(packages)
    queries = [{"package": {"name": n, "ecosystem": "PyPI"}, "version": v} for n, v in asked]
    body = json.dumps({"queries": queries}).encode()
    request = urllib.request.Request(DATABASE, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        results = json.load(answer)["results"]
    return [
        f"{name} {version}: {', '.join(known['id'] for known in result['vulns'])}"
        for (name, version), result in zip(asked, results, strict=True)
        if result.get("vulns")
    ]


def locked() -> dict[str, tuple[str, set[str]]]:
    """Package -> version and hashes of the lock."""
    text = LOCK.read_text(encoding="utf-8")
    found = {}
    for name, version, hashes in re.findall(
        r"^([\w.-]+)==(\S+)((?: \\\n +--hash=\S+)+)", text, re.M
    ):
        found[normal(name)] = version, set(re.findall(r"sha256:[0-9a-f]{64}", hashes))
    return found


def pinned() -> dict[str, str]:
    """Package -> version of the constraints."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line]
    return {normal(name): version for name, version in pairs}


def normal(name: str) -> str:
    """The name of a package as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_differences() -> list[str]:
    """A line for every package of which the lock and the constraints say something else."""
    lock, pins = locked(), pinned()
    versions = {name: version for name, (version, hashes) in lock.items() if hashes}
    return [
        f"{name}: constraints.txt has {pins.get(name)}, constraints.lock {versions.get(name)}"
        for name in sorted({*lock, *pins})
        if versions.get(name) != pins.get(name)
    ]


def wrong_hashes() -> list[str]:
    """Download everything that is pinned, for this machine, and compare; what pip says is wrong."""
    text = LOCK.read_text(encoding="utf-8")
    built = "|".join(BUILT_FOR_DEVICES)
    rest = re.sub(rf"^({built})==.*(\n +--hash.*)+\n", "", text, flags=re.M)
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(rest, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
        ]
        command += ["--require-hashes", "--requirement", str(requirements), "--dest", folder]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"not compared, since builds for devices differ: {', '.join(BUILT_FOR_DEVICES)}")
    return [] if result.returncode == 0 else result.stderr.splitlines()


def main(arguments: list[str]) -> int:
    """Print what is wrong; how the command ends."""
    wrong = lock_differences()
    if arguments == ["--hashes"]:
        wrong += wrong_hashes()
    elif arguments:
        raise SystemExit(__doc__)
    else:
        wrong += licences()
        packages = [(d.name, d.version) for d in installed()]
        try:
            wrong += vulnerabilities((n, v) for n, v in packages if n != "rootfree")
        except OSError as error:
            print(f"vulnerabilities: not checked, the database cannot be reached ({error})")
    for line in wrong:
        print(line)
    print(f"{len(wrong)} findings" if wrong else "nothing found")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
