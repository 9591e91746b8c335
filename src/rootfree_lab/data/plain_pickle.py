"""Pickles read as data: Python's own machine for their opcodes, which calls nothing here.

A pickle says how to make objects: push a name, push arguments, call. Here a call is only written
down (`Made`), and the readers of data sets take out of that what they expect: arrays of numbers,
lists, dictionaries. Nothing a file names is imported, and no memory is interpreted as objects.
"""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: keys of dictionaries, which are hashed: nothing that nests
Key = str | bytes | int


class PickleError(ValueError):
    """What is no pickle of plain data."""


@dataclass(frozen=True)
class Name:
    """A name that a pickle refers to; what it names is not looked up."""

    text: str  # module.name


class _Table(dict[Key, Any]):
    """A dictionary that plain keys alone can be put into."""

    def __setitem__(self, key: Key, value: Any) -> None:
        if not isinstance(key, (str, bytes, int)):
            raise PickleError("a dictionary has a key that is neither text nor a whole number")
        super().__setitem__(key, value)


@dataclass(eq=False)
class Made:
    """A call that a pickle asks for: of which name, with which arguments, state and items."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Key, Any] = field(default_factory=_Table)

    def __setitem__(self, key: Key, value: Any) -> None:
        self.items[key] = value


def read_plain(content: bytes) -> Any:
    """What a pickle holds: numbers, text, bytes, lists, tuples, dictionaries; calls as `Made`."""
    try:
        return _Machine(content).load()
    except PickleError:
        raise
    except Exception as error:  # the machine takes for granted that a pickle is one
        raise PickleError(f"it is no pickle of plain data ({type(error).__name__})") from error


# In Python, not in C: memory is not reserved for what a file only says that it has.
_PYTHONS: Any = pickle._Unpickler  # type: ignore[attr-defined]
_OPCODES = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT",
    "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "STRING",
    "BINSTRING", "SHORT_BINSTRING", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL",
    "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
)  # fmt: skip


class _Machine(_PYTHONS):  # type: ignore[misc]
    dispatch = {code: _PYTHONS.dispatch[code] for code in (vars(pickle)[n][0] for n in _OPCODES)}

    def __init__(self, content: bytes) -> None:
        super().__init__(BytesIO(content), encoding="bytes")  # strings of Python 2
        self._allowance = len(content)  # characters that may yet be copied: no more than there are

    def find_class(self, module: str, name: str) -> Name:
        return Name(f"{self._counted(module)}.{self._counted(name)}")

    def _empty_dict(self) -> None:
        self.append(_Table())

    def _dict(self) -> None:
        values, table = self.pop_mark(), _Table()
        for key, value in zip(values[::2], values[1::2], strict=True):
            table[key] = value
        self.append(table)

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if not isinstance(made, Made):
            raise PickleError(f"it changes a {type(made).__name__}")
        made.state = state

    def _reduce(self) -> None:
        args, of = self.stack.pop(), self.stack.pop()
        if not isinstance(of, Name) or not isinstance(args, tuple):
            raise PickleError("it calls what is no name")
        made: Any = Made(of.text, args)
        # Python 3 writes bytes in the old protocols as text, to be encoded.
        if of.text == "_codecs.encode" and args and isinstance(args[0], str):
            made = self._counted(args[0]).encode("latin-1")
        elif of.text in ("builtins.bytes", "__builtin__.bytes") and not args:
            made = b""
        self.append(made)

    def _counted(self, text: str) -> str:
        """Text that is about to be copied: one that is remembered could be copied for ever."""
        self._allowance -= len(text)
        if self._allowance < 0:
            raise PickleError("it copies more text than it has")
        return text

    dispatch |= {pickle.EMPTY_DICT[0]: _empty_dict, pickle.DICT[0]: _dict, pickle.BUILD[0]: _build}
    dispatch |= {pickle.REDUCE[0]: _reduce, pickle.NEWOBJ[0]: _reduce}


def _text(value: Any) -> str:
    if not isinstance(value, (str, bytes)):
        raise PickleError(f"a name is a {type(value).__name__}")
    return value.decode("latin-1") if isinstance(value, bytes) else value


# -- what readers take out -------------------------------------------------------------------


def what_is(value: Any) -> str:
    """The name of what a pickle would make, or the type of a plain value."""
    return value.name if isinstance(value, Made) else type(value).__name__


def fields_of(made: Any, *names: str) -> dict[str, Any]:
    """The state of an object of one of the named classes: field -> value."""
    name = what_is(made)
    if name in ("copyreg._reconstructor", "copy_reg._reconstructor") and made.args:
        name = getattr(made.args[0], "text", "")
    if name not in names or not isinstance(made.state, dict):
        raise PickleError(f"it has {name} where {names[0]} should be")
    return {_text(key): value for key, value in made.state.items() if not isinstance(key, int)}


def array_of(made: Any) -> NDArray[Any]:
    """An array of numbers, as numpy pickles it."""
    known = isinstance(made, Made) and re.fullmatch(
        r"numpy\.(core|_core)\.multiarray\._reconstruct", made.name
    )
    if not known or not isinstance(made.state, tuple) or len(made.state) not in (4, 5):
        raise PickleError(f"it has {what_is(made)} where an array of numbers should be")
    shape, dtype, fortran, raw = made.state[-4:]
    if not isinstance(shape, tuple) or not all(type(d) is int and 0 <= d < 2**40 for d in shape):
        raise PickleError("an array has no shape")
    kind = _dtype_of(dtype)
    if not isinstance(raw, bytes) or len(raw) != math.prod(shape) * kind.itemsize:
        raise PickleError("an array has not as many bytes as its shape says")
    return np.frombuffer(raw, kind).reshape(shape, order="F" if fortran is True else "C")


def _dtype_of(made: Any) -> np.dtype[Any]:
    if not isinstance(made, Made) or made.name != "numpy.dtype" or not made.args:
        raise PickleError("an array has no dtype")
    text, order = _text(made.args[0]), "<"
    if isinstance(made.state, tuple) and len(made.state) > 1:
        order = _text(made.state[1])
    plain = re.fullmatch(r"[<>|=]?(b1|[iu][1248]|f[248])", text)
    if not plain or order not in ("<", ">", "|", "="):
        raise PickleError(f"an array has elements of dtype {text[:20]!r}, not numbers")
    return np.dtype(("" if order == "|" else order) + plain[1])
