"""The error of this package, and a context that turns errors of file formats into it."""

from __future__ import annotations

import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class DataError(ValueError):
    """Data is missing, truncated or altered, or an argument about data is wrong."""


# What reading a damaged file raises: gzip EOFError and zlib.error, zip BadZipFile, RuntimeError (it
# is encrypted, or says so) and LZMAError, Pillow OSError, pickles ValueError, IndexError, KeyError.
_DAMAGE = (
    OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, SyntaxError,
    OverflowError, MemoryError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile,
    tarfile.TarError, struct.error,
)  # fmt: skip


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors inside into a `DataError` that names the file."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing.") from error
    except PermissionError as error:
        raise DataError(f"{path} may not be read by this user.") from error
    except _DAMAGE as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise DataError(f"{path} is truncated or altered: it cannot be read ({reason}).") from error


def existing_folder(folder: Path, *usual: str) -> Path:
    """The folder, or the first of the `usual` folders that archives make in it; it must exist."""
    if not folder.is_dir():
        raise DataError(f"there is no folder {str(folder)!r}.")
    return next((folder / name for name in usual if (folder / name).is_dir()), folder)
