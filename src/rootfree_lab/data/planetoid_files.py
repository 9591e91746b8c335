"""The Planetoid graphs as their authors published them: `ind.NAME.x`, `.tx`, `.allx`, `.graph`, ...

x, y: training nodes; allx, ally: all nodes but the test ones, the training nodes first; tx, ty: the
test nodes in the order of `test.index`; graph: the neighbours of each node. A y has a row for each
node, with a one in the column of its class.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootfree_lab.data.errors import reading
from rootfree_lab.data.plain_pickle import load_plain

Arrays = dict[str, NDArray[Any]]

_VALIDATION = 500  # of the nodes after the training ones, as is the custom with these graphs


def has_published_files(folder: Path, name: str) -> bool:
    """Whether the folder has the published files of a graph."""
    return (folder / f"ind.{name}.graph").is_file()


def read_published(folder: Path, name: str) -> Arrays:
    """The arrays of `NAME.npz` from the published files."""
    parts = {part: _unpickled(folder / f"ind.{name}.{part}") for part in _PARTS}
    path = folder / f"ind.{name}.test.index"
    with reading(path):
        order = np.array([int(word) for word in path.read_text().split()], dtype=np.int64)
    with reading(folder / f"ind.{name}.*"):
        return _joined(parts, order)


_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph")


def _joined(parts: dict[str, Any], order: NDArray[np.int64]) -> Arrays:
    known, tested = parts["allx"], parts["tx"]
    nodes = len(parts["graph"])
    if len(order) != tested.rows or order.min() < known.rows or order.max() >= nodes:
        raise ValueError("test.index does not fit the other files")
    rows: list[tuple[NDArray[Any], NDArray[Any]]] = [(_NOTHING, _NOTHING)] * nodes
    labels = np.full(nodes, -1)  # Citeseer has isolated nodes that are in no file
    for node in range(known.rows):
        rows[node] = known.row(node)
    labels[: known.rows] = _classes(parts["ally"])
    for place, node in enumerate(order):
        rows[node] = tested.row(place)
    labels[order] = _classes(parts["ty"])
    edges = {(min(a, b), max(a, b)) for a, near in parts["graph"].items() for b in near if a != b}
    train = parts["x"].rows
    return {
        "feat_data": np.concatenate([values for _, values in rows]).astype(np.float32),
        "feat_indices": np.concatenate([columns for columns, _ in rows]).astype(np.int64),
        "feat_indptr": np.cumsum([0, *(len(columns) for columns, _ in rows)]),
        "feat_shape": np.array([nodes, known.columns]),
        "labels": labels,
        "edges": np.array(sorted(edges), dtype=np.int64).reshape(-1, 2),
        "train_idx": np.arange(train),
        "val_idx": np.arange(train, min(train + _VALIDATION, known.rows)),
        "test_idx": np.sort(order),
    }


_NOTHING = np.zeros(0, dtype=np.int64)


def _classes(hot: NDArray[Any]) -> NDArray[np.int64]:
    # A row of zeros says that a node has no class.
    found: NDArray[np.int64] = np.where(np.asarray(hot).any(1), np.asarray(hot).argmax(1), -1)
    return found


class _Rows:
    """A matrix in compressed sparse rows, with nothing of the class that was pickled but data."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        shape = state["_shape"] if "_shape" in state else state["shape"]
        self.rows, self.columns = (int(d) for d in shape)
        self._data, self._indices = np.asarray(state["data"]), np.asarray(state["indices"])
        self._starts = np.asarray(state["indptr"])
        if len(self._starts) != self.rows + 1 or self._starts[-1] != len(self._data):
            raise ValueError("a matrix is not in compressed sparse rows")

    def row(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Columns and values of a row."""
        part = slice(self._starts[number], self._starts[number + 1])
        return self._indices[part], self._data[part]


def _made(kind: type, base: type, state: Any) -> Any:
    """What copyreg's `_reconstructor` gives, for the classes that are allowed."""
    return kind()


_ALLOWED = {
    ("collections", "defaultdict"): defaultdict,
    **{
        (module, name): kind
        for module in ("builtins", "__builtin__")
        for name, kind in (("list", list), ("object", object))
    },
    **{(module, "_reconstructor"): _made for module in ("copyreg", "copy_reg")},
    # Where scipy had the class, in its versions.
    **{
        (module, "csr_matrix"): _Rows
        for module in ("scipy.sparse.csr", "scipy.sparse._csr", "scipy.sparse")
    },
}


def _unpickled(path: Path) -> Any:
    with reading(path):
        # Written by Python 2: its strings are bytes.
        return load_plain(path.read_bytes(), encoding="latin1", allowed=_ALLOWED)
