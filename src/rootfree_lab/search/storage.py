"""Where a search keeps its trials: a journal file, or a database by its URL; errors in words."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import optuna
from filelock import Timeout
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, get_storage
from optuna.storages.journal import JournalFileBackend

from rootfree_lab.config.reading import ConfigError
from rootfree_lab.files.appending import append_lines
from rootfree_lab.files.durable import NotWritten

_PATIENCE = 60.0  # seconds for which another process may hold the storage
_DELAYS = (1, 2, 4, 8, 16, 32)  # seconds between attempts

T = TypeVar("T")


class StorageError(ValueError):
    """A storage that cannot be used, or holds another search."""


class _Journal(JournalFileBackend):
    """Optuna's journal, made safe against kills.

    A killed process gives its lock back at once, and a line that it left unfinished is taken away
    by the next one that writes: otherwise the whole journal could never be read again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        super().__init__(str(path))

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        lock = f"{self._path}.flock"  # Optuna's own lock is `.lock`, and is a link
        append_lines(self._path, lambda: text, lock=lock, timeout=_PATIENCE)


def open_storage(where: str) -> BaseStorage:
    """The journal file of this name, or the database of this URL."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with in_words(where):
        if "://" not in where:
            path = Path(where)
            path.parent.mkdir(parents=True, exist_ok=True)
            return JournalStorage(_Journal(path))
        waits = {"timeout": _PATIENCE} if where.startswith("sqlite") else {}
        engine = {"pool_pre_ping": True, "connect_args": waits}
        made = partial(RDBStorage, where, engine_kwargs=engine)
        return get_storage(patiently(made, _being_made, delays=_DELAYS[:3]))


@contextmanager
def in_words(where: str) -> Iterator[None]:
    """Turn what goes wrong with a storage into one sentence."""
    shown = _without_password(where)
    try:
        yield
    except (StorageError, ConfigError, NotWritten):
        raise
    except ImportError as error:
        needs = f"needs {error.name}" if error.name else "needs a package that is not here"
        raise StorageError(f"the storage {shown} {needs}: {_line(error)}") from error
    except Timeout as error:
        raise StorageError(
            f"the storage {shown} has been locked by another process for {_PATIENCE:.0f} s"
        ) from error
    except OSError as error:
        raise StorageError(f"the storage {shown} cannot be used: {error}") from error
    except (json.JSONDecodeError, KeyError, AssertionError) as error:
        raise StorageError(f"{shown} is not a journal of Optuna: {error!r}") from error
    except ValueError as error:
        if "://" in where:
            raise
        raise StorageError(f"{shown} is not a journal of Optuna: {error}") from error
    except Exception as error:
        if not _of_a_database(error):
            raise
        locked = "locked" in str(error).lower() or "locked" in str(error.__cause__).lower()
        what = "is locked by another process" if locked else "cannot be used"
        raise StorageError(
            f"the storage {shown} {what}: {_line(error.__cause__ or error)}"
        ) from error


def _unanswered(error: Exception) -> bool:
    return isinstance(error, OSError | Timeout) or _of_a_database(error)


def _being_made(error: Exception) -> bool:
    """Two machines that begin at once both make the tables of an empty database."""
    return _of_a_database(error) and "already exists" in str(error)


def patiently(
    action: Callable[[], T],
    passes: Callable[[Exception], bool] = _unanswered,
    *,
    delays: Sequence[int] | None = None,
) -> T:
    """Do something with a storage, again for a minute where it fails in a way that passes."""
    for seconds in _DELAYS if delays is None else delays:
        try:
            return action()
        except Exception as error:
            if not passes(error):
                raise
            time.sleep(seconds)
    return action()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _of_a_database(error: Exception) -> bool:
    kinds = (optuna.exceptions.StorageInternalError, optuna.exceptions.OptunaError)
    return isinstance(error, kinds) or type(error).__module__.startswith("sqlalchemy")


def _without_password(where: str) -> str:
    scheme, separator, rest = where.partition("://")
    user, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{user.partition(':')[0]}{at}{host}" if separator else where
