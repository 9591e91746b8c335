"""Reads pickles as data, with a small machine for their opcodes that calls nothing.

A pickle is a program that makes objects: it pushes a name, pushes arguments, calls. Here a call is
only recorded (`Made`), and the readers of data sets take what they expect from the records: arrays
of numbers, lists, dictionaries. Names in a file are never imported, and its bytes are never
interpreted as objects.
"""

from __future__ import annotations

import math
import pickletools
import re
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class Made:
    """A call that a pickle asks for: of which name, with which arguments, state and items."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Key, Any] = field(default_factory=dict)


_MARK = object()  # where a group of values begins on the stack
_CONSTANTS = {
    "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (),
}  # fmt: skip
_VALUES = (
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "UNICODE",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
)  # fmt: skip
_STRINGS = ("STRING", "BINSTRING", "SHORT_BINSTRING")  # of Python 2: bytes
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_SKIPPED = ("PROTO", "FRAME")


def read_plain(content: bytes) -> Any:
    """What a pickle holds: numbers, text, bytes, lists, tuples, dictionaries; calls as `Made`."""
    machine = _Machine(allowance=len(content))
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name == "STOP":
            return machine.pop()
        machine.run(opcode.name, argument)
    raise PickleError("it ends before its end")


class _Machine:
    def __init__(self, *, allowance: int) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._allowance = allowance  # characters that may still be copied; at most the file's size

    def pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise PickleError("it takes more from its stack than is there")
        return self._stack.pop()

    def run(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        push = self._stack.append
        if name in _VALUES:
            push(argument)
        elif name in _STRINGS:
            push(str(argument).encode("latin-1"))
        elif name in _CONSTANTS:
            push(_CONSTANTS[name])
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            push([] if name == "EMPTY_LIST" else {})
        elif name == "MARK":
            push(_MARK)
        elif name in _TUPLES:
            push(tuple(reversed([self.pop() for _ in range(_TUPLES[name])])))
        elif name in ("TUPLE", "LIST"):
            values = self._since_mark()
            push(tuple(values) if name == "TUPLE" else values)
        elif name == "DICT":
            push(_pairs(self._since_mark()))
        elif name in ("APPEND", "APPENDS"):
            values = [self.pop()] if name == "APPEND" else self._since_mark()
            self._top(list).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = self._two() if name == "SETITEM" else self._since_mark()
            owner = self._top((dict, Made))
            (owner.items if isinstance(owner, Made) else owner).update(_pairs(values))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            words = str(argument).split(" ") if name == "GLOBAL" else self._two()
            push(Name(".".join(self._counted(_text(word)) for word in words)))
        elif name in ("REDUCE", "NEWOBJ"):
            of, args = self._two()
            push(self._made(of, args))
        elif name == "BUILD":
            state = self.pop()
            self._top(Made).state = state
        elif name in ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE"):
            self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._top(object)
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            push(self._memo[argument])
        elif name in ("POP", "POP_MARK"):
            self.pop() if name == "POP" else self._since_mark()
        elif name not in _SKIPPED:
            raise PickleError(f"it has the opcode {name}")

    def _made(self, of: Any, args: Any) -> Any:
        if not isinstance(of, Name) or not isinstance(args, tuple):
            raise PickleError("it calls what is no name")
        # Python 3 writes bytes in the old protocols as text, to be encoded.
        if of.text == "_codecs.encode" and args and isinstance(args[0], str):
            return self._counted(args[0]).encode("latin-1")
        if of.text in ("builtins.bytes", "__builtin__.bytes") and not args:
            return b""
        return Made(of.text, args)

    def _counted(self, text: str) -> str:
        """Count text that is about to be copied, as memorised text could be copied for ever."""
        self._allowance -= len(text)
        if self._allowance < 0:
            raise PickleError("it copies more text than it has")
        return text

    def _two(self) -> list[Any]:
        second = self.pop()
        return [self.pop(), second]

    def _since_mark(self) -> list[Any]:
        for i in range(len(self._stack) - 1, -1, -1):
            if self._stack[i] is _MARK:
                values = self._stack[i + 1 :]
                del self._stack[i:]
                return values
        raise PickleError("it has no mark")

    def _top(self, kind: Any) -> Any:
        value = self.pop()
        self._stack.append(value)
        if not isinstance(value, kind):
            raise PickleError(f"it changes a {type(value).__name__}")
        return value


def _pairs(values: list[Any]) -> dict[Key, Any]:
    if len(values) % 2:
        raise PickleError("a dictionary has a key without a value")
    if not all(isinstance(key, (str, bytes, int)) for key in values[::2]):
        raise PickleError("a dictionary has a key that is neither text nor a whole number")
    return dict(zip(values[::2], values[1::2], strict=True))


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
