"""`load` reads a data set by name; `fetch` gets one from the network or a package."""

from __future__ import annotations

from pathlib import Path

from rootfree_lab.config import own_code
from rootfree_lab.data.cache import cache_folder, is_cached, locked, store, temporary_folder, verify
from rootfree_lab.data.dataset import Dataset, limited
from rootfree_lab.data.errors import DataError
from rootfree_lab.data.image_folder import read_image_folder
from rootfree_lab.data.packages import Package
from rootfree_lab.data.published import Published
from rootfree_lab.data.registry import Source, source

_DEFAULT_SIZE = 64


def load(
    name: str,
    *,
    folder: Path | None = None,
    cache: Path | None = None,
    limit: int | None = None,
    size: int | None = None,
) -> Dataset:
    """Load a data set into memory.

    Args:
        name: One of `names()`, or a user's own function: "package.module:name", "file.py:name".
        folder: Where its standard files are (for `text_file`, the file); without it the cache or
            an installed package is read. Nothing is downloaded: that is `fetch`.
        cache: The cache, in the place of `ROOTFREE_CACHE` or the platform's folder.
        limit: Keep only the first so many examples (tokens) of each split.
        size: Pixels of a side for `image_folder`, 64 if it is not given.

    >>> digits = load("digits", limit=100)
    >>> digits.shape, digits.classes, len(digits.train)
    ((1, 8, 8), 10, 100)
    """
    for argument, value in (("limit", limit), ("size", size)):
        if value is not None and value < 1:
            raise DataError(f"{argument} must be at least 1, got {value}.")
    if own_code.is_own(name):
        return _load_own(name, folder=folder, limit=limit, size=size)
    found = source(name)
    if size is not None and name != "image_folder":
        raise DataError(f"size is for image_folder alone, got {size} for {name!r}.")
    try:
        if found.built_in is not None:
            if folder is not None:
                raise DataError(f"{name!r} is read from no folder, got {str(folder)!r}.")
            dataset = found.built_in()
        else:
            where = _located(found, folder, cache_folder(cache))
            if found.read is None:
                return read_image_folder(where, size=size or _DEFAULT_SIZE, limit=limit)
            dataset = found.read(where)
    except ModuleNotFoundError as error:
        raise DataError(f"{name!r} needs {error.name}: pip install 'rootfree[lab]'") from error
    except DataError as error:
        raise DataError(f"{name}: {error} To get it: {found.how}") from error
    return dataset if limit is None else limited(dataset, limit)


def _load_own(name: str, *, folder: Path | None, limit: int | None, size: int | None) -> Dataset:
    """The data set of a user's function, which gets folder, limit and size if they are given."""
    what, function = f"the data set {own_code.shown(name)}", own_code.load("data.name", name)
    given = {"folder": folder, "limit": limit, "size": size}
    given = {key: value for key, value in given.items() if value is not None}
    taken = own_code.check_arguments(what, function, {}, given)
    for key in given:
        if key not in (*taken, "limit"):
            raise DataError(f"data.{key} is given, but {what} has no argument of that name.")
    dataset = own_code.call(what, function, {key: given[key] for key in taken})
    if not isinstance(dataset, Dataset):
        raise DataError(
            f"{what} must return a rootfree_lab.data.Dataset, got {type(dataset).__name__}."
        )
    return dataset if limit is None or "limit" in taken else limited(dataset, limit)


def fetch(name: str, *, cache: Path | None = None) -> Path | None:
    """Put a data set into the cache and return the folder, or None where it needs no cache.

    An entry of the cache is kept if its checksums are right, and replaced otherwise.
    """
    found = source(name)
    if found.built_in is not None:
        load(name)
        return None
    if not found.ways:
        raise DataError(f"{name!r} cannot be fetched. {found.how}")
    root = cache_folder(cache)
    if (whole := next((w for w in found.ways if _is_whole(w.entry, root)), None)) is not None:
        return root / whole.entry
    failures = []
    try:
        for way in found.ways:
            try:
                return _fetched(found, way, root)
            except DataError as error:
                failures.append(str(error))
    except OSError as error:  # for instance a full disk
        raise DataError(f"{name} could not be put into the cache {root}: {error}.") from error
    except ModuleNotFoundError as error:
        raise DataError(f"{name!r} needs {error.name}: pip install 'rootfree[lab]'") from error
    otherwise = found.how.partition(", or ")[2]  # than by what has just failed
    reasons = " ".join(dict.fromkeys(failures))
    raise DataError(f"{name}: {reasons} To get it otherwise, {otherwise}")


def _fetched(found: Source, way: Published | Package, root: Path) -> Path:
    with locked(root, way.entry):
        if _is_whole(way.entry, root):  # by another process
            return root / way.entry
        with temporary_folder(root) as temporary:
            work, prepared = temporary / "work", temporary / "prepared"
            work.mkdir()
            prepared.mkdir()
            way.unpack(work, prepared)
            if found.read is not None:
                found.read(prepared)  # an entry is readable when it enters the cache
            return store(prepared, root, way.entry)


def status(name: str, *, cache: Path | None = None) -> str:
    """Return "cached", "installed", "to fetch" or "needs folder"."""
    found = source(name)
    if any(is_cached(cache_folder(cache), way.entry) for way in found.ways):
        return "cached"
    if found.built_in is not None or found.installed() is not None:
        return "installed"
    return "to fetch" if found.ways else "needs folder"


def _is_whole(entry: str, cache: Path) -> bool:
    if not is_cached(cache, entry):
        return False
    try:
        verify(cache / entry)
    except DataError:
        return False
    return True


def _located(found: Source, folder: Path | None, cache: Path) -> Path:
    if folder is not None:
        return Path(folder).expanduser()
    if not found.ways:
        raise DataError("it needs a folder.")
    for way in found.ways:
        if is_cached(cache, way.entry):
            verify(cache / way.entry)
            return cache / way.entry
    if (installed := found.installed()) is not None:
        return installed
    raise DataError(f"it is not in the cache {cache}.")
