"""A file system that fails on purpose, as SQLite tests itself.

Inside `FaultyFiles` every operation that changes something below a folder is counted: open (to
write), write, truncate, fsync, rename, unlink, mkdir. At the n-th one something happens: it fails
with an error of the system, it writes half, or the process dies. What a power cut would leave is
known at any moment: file contents as of their last fsync, names as of the last fsync of their
folder.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th operation (from 0); `short` goes with writes alone."""

    at: int
    error: int = 0  # an errno; 0: the process dies
    short: bool = False  # the operation, if it is a write, is half done first
    lasting: bool = False  # all operations from then on fail too
    power: bool = False  # with the process, all that was not flushed to the disk goes

    def __str__(self) -> str:
        what = errno.errorcode.get(self.error, "kill")
        more = [name for name in ("short", "lasting", "power") if getattr(self, name)]
        return "-".join([what, *more, str(self.at)])


def faults(operations: list[str], kinds: list[dict[str, Any]]) -> list[Fault]:
    """Every kind of fault at every operation; half a write only where something is written."""
    return [
        Fault(at, **kind)
        for at, name in enumerate(operations)
        for kind in kinds
        if name == "write" or not kind.get("short")
    ]


@dataclass
class _Content:
    """A file, whatever its name; `synced` is what a power cut would leave."""

    synced: bytes = b""


@dataclass
class FaultyFiles:
    """Context in which operations below `folder` are counted, and one of them meets a fault."""

    folder: Path
    fault: Fault | None = None
    operations: list[str] = field(default_factory=list)

    def __enter__(self) -> FaultyFiles:
        self._real: dict[tuple[Any, str], Any] = {}
        self._handles: dict[int, str] = {}
        files = [p for p in self.folder.rglob("*") if p.is_file()]
        self._names = {str(p): _Content(p.read_bytes()) for p in files}
        self._durable = dict(self._names)
        for module, name, made in (
            (builtins, "open", self._open),
            (io, "open", self._open),
            (os, "open", self._os_open),
            (os, "fsync", self._fsync),
            (os, "replace", self._rename),
            (os, "rename", self._rename),
            (os, "unlink", self._unlink),
            (os, "remove", self._unlink),
            (os, "mkdir", self._mkdir),
            (os, "ftruncate", self._ftruncate),
        ):
            self._real[module, name] = getattr(module, name)
            setattr(module, name, made)
        return self

    def __exit__(self, *error: object) -> None:
        for (module, name), real in self._real.items():
            setattr(module, name, real)

    # -- faults ------------------------------------------------------------------------------

    def meet(self, name: str, half: Callable[[], Any] | None = None) -> Any:
        """Count an operation; None where it may go on, otherwise what it has to return."""
        number, fault = len(self.operations), self.fault
        self.operations.append(name)
        if fault is None or number < fault.at or (number > fault.at + 1 and not fault.lasting):
            return None
        if number == fault.at and fault.short:
            assert half is not None
            written = half()
            if fault.error:
                return written  # as a full disk does; the rest fails
        elif number == fault.at + 1 and not (fault.lasting or fault.short):
            return None
        if fault.error:
            raise OSError(fault.error, os.strerror(fault.error))
        if fault.power:
            self._cut_power()
        os.kill(os.getpid(), signal.SIGKILL)

    def _cut_power(self) -> None:
        for name in self._names:
            if os.path.exists(name):
                self._real[os, "unlink"](name)
        for name, content in self._durable.items():
            with self._real[builtins, "open"](name, "wb") as file:
                file.write(content.synced)

    def _is_mine(self, path: Any) -> bool:
        return not isinstance(path, int) and str(self.folder) in os.path.abspath(os.fspath(path))

    # -- operations --------------------------------------------------------------------------

    def _open(self, path: Any, mode: str = "r", buffering: int = -1, *rest: Any, **options: Any):
        writes = any(letter in mode for letter in "wax+")
        if not (writes and self._is_mine(path)):
            return self._real[builtins, "open"](path, mode, buffering, *rest, **options)
        assert "b" in mode, "what is written here is written as bytes"
        self.meet("open")
        raw = _FaultyFile(self, os.path.abspath(os.fspath(path)), mode.replace("b", ""))
        if buffering == 0:
            return raw
        return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

    def _os_open(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        mine = self._is_mine(path)
        if mine and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.meet("open")
            self._names.setdefault(os.path.abspath(path), _Content())
        handle = self._real[os, "open"](path, flags, *rest, **options)
        if mine:
            self._handles[handle] = os.path.abspath(path)
        return handle

    def _fsync(self, handle: int) -> None:
        name = self._handles.get(handle)
        if name is not None:
            self.meet("fsync")
        self._real[os, "fsync"](handle)
        if name is not None and os.path.isdir(name):
            of_folder = [n for n in {*self._names, *self._durable} if os.path.dirname(n) == name]
            for each in of_folder:
                self._durable.pop(each, None)
                if each in self._names:
                    self._durable[each] = self._names[each]
        elif name is not None:
            self._names[name].synced = Path(name).read_bytes()

    def _rename(self, source: Any, target: Any) -> None:
        if self._is_mine(target):
            self.meet("rename")
        self._real[os, "replace"](source, target)
        if self._is_mine(target):
            self._names[os.path.abspath(target)] = self._names.pop(os.path.abspath(source))

    def _unlink(self, path: Any, **options: Any) -> None:
        if self._is_mine(path) and os.path.exists(path):
            self.meet("unlink")
        self._real[os, "unlink"](path, **options)
        if self._is_mine(path):
            self._names.pop(os.path.abspath(path), None)

    def _mkdir(self, path: Any, *rest: Any, **options: Any) -> None:
        if self._is_mine(path) and not os.path.exists(path):
            self.meet("mkdir")
        self._real[os, "mkdir"](path, *rest, **options)

    def _ftruncate(self, handle: int, length: int) -> None:
        if handle in self._handles:
            self.meet("truncate")
        self._real[os, "ftruncate"](handle, length)


class _FaultyFile(io.FileIO):
    """A file without a buffer whose writes are counted."""

    def __init__(self, files: FaultyFiles, name: str, mode: str) -> None:
        super().__init__(name, mode)
        self._files = files
        files._handles[self.fileno()] = name
        files._names.setdefault(name, _Content())

    def write(self, data: Any) -> int:
        written = self._files.meet("write", lambda: super(_FaultyFile, self).write(_half(data)))
        return super().write(data) if written is None else written

    def truncate(self, size: int | None = None) -> int:
        self._files.meet("truncate")
        return super().truncate(size)

    def close(self) -> None:
        if not self.closed:
            self._files._handles.pop(self.fileno(), None)
        super().close()


def _half(data: Any) -> memoryview:
    view = memoryview(data).cast("B")
    return view[: max(1, len(view) // 2)]


def in_child(work: Callable[[], object]) -> int:
    """Do something in a child of this process; how it ended: 0, or minus the signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
