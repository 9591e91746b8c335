"""The results of one run of the benchmark, and their JSON."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import rootfree
from rootfree_lab.bench.ceilings import Ceilings
from rootfree_lab.bench.timing import Spread
from rootfree_lab.config.reading import ConfigError, build

_PACKAGES = ("triton", "sirfshampoo", "singd", "pytorch_optimizer", "heavyball", "timm")


class RecordError(ValueError):
    """A file that is not a record of the benchmark."""


@dataclass(frozen=True)
class Environment:
    """The machine, the date and the versions of a measurement."""

    device: str
    threads: int
    date: str
    versions: dict[str, str]


@dataclass(frozen=True)
class _Row:
    """One contender; one that failed has the reason, and no figures."""

    name: str
    family: str
    period: int
    failure: str | None = None


@dataclass(frozen=True)
class StepRow(_Row):
    """Steps of a contender."""

    note: str | None = None
    ms: Spread | None = None  # a step, amortised over the period
    ratio: float | None = None  # to the reference beside it
    refresh_ms: float | None = None
    plain_ms: float | None = None
    device_ms: float | None = None  # with the host ahead
    state_bytes_per_parameter: float | None = None
    temporary_bytes: int | None = None
    bytes_moved: float | None = None  # a step has to, amortised
    flops: float | None = None
    terabytes_per_second: float | None = None
    teraflops_per_second: float | None = None
    matmul_dtype: str | None = None
    floor_ms: float | None = None
    times_floor: float | None = None


@dataclass(frozen=True)
class IterationRow(_Row):
    """Whole training iterations of a contender: milliseconds."""

    ms: Spread | None = None  # a whole iteration
    ratio: float | None = None
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True)
class StepRecord:
    """Steps of several optimizers on one set of parameters."""

    parameters: str  # name of the set or model
    count: int
    tensors: int
    dtype: str
    reference: str
    arrangement: str
    settings: dict[str, Any]
    environment: Environment
    ceilings: Ceilings
    rows: list[StepRow]


@dataclass(frozen=True)
class IterationRecord:
    """Training iterations of one model with several optimizers."""

    model: str
    count: int
    batch: int
    autocast: str
    reference: str
    settings: dict[str, Any]
    environment: Environment
    rows: list[IterationRow]


Record = StepRecord | IterationRecord
_KINDS: dict[str, type[Record]] = {
    "rootfree bench steps 1": StepRecord,
    "rootfree bench iterations 1": IterationRecord,
}


def environment(device: torch.device) -> Environment:
    """Of this process, now."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["rootfree"] = rootfree.__version__
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Environment(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        threads=torch.get_num_threads(),
        date=datetime.now(timezone.utc).date().isoformat(),
        versions=versions,
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def write(record: Record, path: Path) -> None:
    """Into a file, as JSON."""
    (kind,) = [name for name, cls in _KINDS.items() if isinstance(record, cls)]
    content = {"format": kind, **asdict(record)}
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path) -> Record:
    """What `write` wrote; anything else is an error that names the place."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
    kind = content.pop("format", None) if isinstance(content, dict) else None
    if kind not in _KINDS:
        raise RecordError(f"{path} is no record of rootfree bench: its format is {kind!r}")
    try:
        return build(_KINDS[kind], content, str(path))
    except ConfigError as error:
        raise RecordError(str(error)) from error
