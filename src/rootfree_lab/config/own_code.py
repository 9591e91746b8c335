"""A user's own model, data set or loss: `"package.module:name"`, or `"file.py:name"`.

A file is relative to the folder of the config. Only code that a config names is imported. The
checksum of its file is part of the identity of a run.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rootfree_lab.config.reading import ConfigError, Table, check_names, unknown_name

#: The settings that may name a user's code.
SETTINGS = (("data", "name"), ("model", "name"), ("train", "loss"))


def is_own(name: str) -> bool:
    """Whether a name refers to a user's code, not to the laboratory."""
    return ":" in name


def _is_file(module: str) -> bool:
    return module.endswith(".py")


def make_absolute(tables: Table, folder: Path) -> None:
    """Make paths of files absolute that are relative to `folder`.  Changes tables."""
    _rename(tables, lambda file: str((folder / Path(file).expanduser()).resolve()))


def make_relative(tables: Table, folder: Path) -> None:
    """Make them relative to `folder`, for a config that is written there.  Changes tables."""

    def relative(file: str) -> str:
        try:
            return Path(os.path.relpath(file, folder.resolve())).as_posix()
        except ValueError:  # another drive
            return file

    _rename(tables, relative)


def _rename(tables: Table, renamed: Callable[[str], str]) -> None:
    for section, field in SETTINGS:
        table = tables.get(section)
        name = table.get(field) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(name, str) and is_own(name):
            module, _, attribute = name.rpartition(":")
            if _is_file(module):
                table[field] = f"{renamed(module)}:{attribute}"


def shown(name: str) -> str:
    """A name without the folder of its file, which differs between machines."""
    module, _, attribute = name.rpartition(":")
    return f"{Path(module).name}:{attribute}" if _is_file(module) else name


def checksum(name: str) -> str:
    """The checksum of the file that a name refers to, without the files that it imports."""
    path = _source(name)
    return "" if path is None else file_checksum(path)


def file_checksum(path: Path) -> str:
    """The checksum of a file; empty if it cannot be read, which other code reports."""
    try:
        status = path.stat()
        return _checksum(path, status.st_mtime_ns, status.st_size)
    except OSError:
        return ""


@lru_cache(maxsize=64)  # identities are computed often
def _checksum(path: Path, changed: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _source(name: str) -> Path | None:
    module = name.rpartition(":")[0]
    if _is_file(module):
        return Path(module)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None  # `load` says so
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def load(setting: str, name: str) -> Callable[..., Any]:
    """The object that a name refers to; error messages name the `setting`."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute.isidentifier():
        raise ConfigError(
            f'{setting} must be "package.module:name" or "file.py:name", got {name!r}'
        )
    module = _module(setting, module_name)
    if not hasattr(module, attribute):
        public = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        raise unknown_name(f"{setting}: the name in {module_name}", attribute, public)
    found = getattr(module, attribute)
    if not callable(found):
        raise ConfigError(f"{setting}: {name} must be callable, got {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _module(setting: str, name: str) -> ModuleType:
    try:
        if not _is_file(name):
            return importlib.import_module(name)
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"{setting}: there is no file {name!r}")
        return _from_file(path, path.stat().st_mtime_ns)
    except ConfigError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"{setting}: there is no module {error.name!r}; install its package, add its "
                "folder to PYTHONPATH, or name a file beside the config (file.py:name)"
            ) from error
        raise ConfigError(
            f"{setting}: {name} needs {error.name}, which is not here; install its package, or "
            "add its folder to PYTHONPATH"
        ) from error
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"{setting}: {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error


@lru_cache(maxsize=32)
def _from_file(path: Path, changed: int) -> ModuleType:
    name = f"rootfree_own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle looks for its classes
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_arguments(
    what: str, function: Callable[..., Any], given: Mapping[str, Any], provided: Iterable[str] = ()
) -> list[str]:
    """Raise if options are unknown or missing; which of the `provided` arguments it takes."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C: it checks its own arguments
        return []
    kinds = {parameter.kind for parameter in parameters.values()}
    named = [
        name
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        check_names(f"the option of {what},", given, named)
    taken = [name for name in provided if name in named]
    for name in named:
        required = parameters[name].default is inspect.Parameter.empty
        if required and name not in given and name not in taken:
            raise ConfigError(f"{what} needs the option {name!r}")
    return taken


def call(what: str, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a user's function; an error that it raises is reported with its name."""
    try:
        return function(**given)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} raised {type(error).__name__}: {error}") from error
