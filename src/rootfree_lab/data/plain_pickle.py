"""Pickles of arrays, strings, lists and dictionaries, read so that nothing in them can run code."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Allowed = Mapping[tuple[str, str], Any]

_ARRAYS = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    # Python 3 writes the bytes of an array as latin-1 text in the old pickle protocols.
    ("_codecs", "encode"): lambda text, encoding: str(text).encode(str(encoding)),
}


def load_plain(content: bytes, *, encoding: str, allowed: Allowed | None = None) -> Any:
    """What a pickle holds; a name that is neither numpy's nor among the `allowed` is an error."""
    unpickler = _PlainUnpickler(io.BytesIO(content), encoding=encoding)
    unpickler.allowed = {**_ARRAYS, **(allowed or {})}
    return unpickler.load()


class _PlainUnpickler(pickle.Unpickler):
    allowed: Allowed

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(("numpy.core.", "numpy._core.")) and name == "_reconstruct":
            return _empty_array
        try:
            return self.allowed[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}") from None


def _empty_array(kind: type, shape: tuple[int, ...], dtype: bytes | str) -> NDArray[Any]:
    """What numpy's `_reconstruct` gives: an empty array that its pickled state then fills."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError("it holds an array of an unknown kind")
    return np.ndarray(shape, dtype.decode() if isinstance(dtype, bytes) else dtype)
