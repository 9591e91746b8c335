"""The Planetoid graphs as their authors published them: `ind.NAME.x`, `.tx`, `.allx`, `.graph`, ...

x, y: training nodes; allx, ally: all nodes but the test ones, the training nodes first; tx, ty: the
test nodes in the order of `test.index`; graph: the neighbours of each node. A y has a row for each
node, with a one in the column of its class.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rootfree_lab.data.errors import reading
from rootfree_lab.data.plain_pickle import Made, array_of, fields_of, read_plain, what_is

Arrays = dict[str, NDArray[Any]]

_VALIDATION = 500  # of the nodes after the training ones, as is the custom with these graphs


def has_published_files(folder: Path, name: str) -> bool:
    """Whether the folder has the published files of a graph."""
    return (folder / f"ind.{name}.graph").is_file()


def read_published(folder: Path, name: str) -> Arrays:
    """The arrays of `NAME.npz` from the published files."""
    parts = {part: _read(folder / f"ind.{name}.{part}", part) for part in _PARTS}
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
    """A matrix in compressed sparse rows."""

    def __init__(self, made: Any) -> None:
        state = fields_of(made, *_MATRICES)
        shape = state["_shape"] if "_shape" in state else state["shape"]
        if not isinstance(shape, tuple) or [type(d) for d in shape] != [int, int]:
            raise ValueError("a matrix has no shape")
        self.rows, self.columns = shape
        self._data, self._indices, starts = (
            array_of(state[name]) for name in ("data", "indices", "indptr")
        )
        counts = np.diff(starts)
        sound = starts.ndim == self._data.ndim == 1 and len(starts) == self.rows + 1
        sound = sound and self._data.shape == self._indices.shape and starts[0] == 0
        if not sound or starts[-1] != len(self._data) or (counts < 0).any():
            raise ValueError("a matrix is not in compressed sparse rows")
        self._starts = starts

    def row(self, number: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Columns and values of a row."""
        part = slice(self._starts[number], self._starts[number + 1])
        return self._indices[part], self._data[part]


# Where scipy had the class, in its versions.
_MATRICES = (
    "scipy.sparse.csr.csr_matrix", "scipy.sparse._csr.csr_matrix", "scipy.sparse.csr_matrix",
)  # fmt: skip


def _neighbours(made: Any) -> dict[int, list[int]]:
    """The graph: a defaultdict from each node to the nodes near it."""
    graph = made.items if isinstance(made, Made) and made.name == _DEFAULTDICT else made
    if not isinstance(graph, dict):
        raise ValueError(f"it has {what_is(made)} where a dictionary should be")
    for node, near in graph.items():
        if type(node) is not int or not isinstance(near, list):
            raise ValueError("the graph has a node without a list of neighbours")
        if not all(type(other) is int for other in near):
            raise ValueError("the graph has a neighbour that is no number")
    return graph  # type: ignore[return-value]


_DEFAULTDICT = "collections.defaultdict"


def _read(path: Path, part: str) -> Any:
    with reading(path):
        made = read_plain(path.read_bytes())
        if part == "graph":
            return _neighbours(made)
        return _Rows(made) if part.endswith("x") else array_of(made)
