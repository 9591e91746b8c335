"""The Planetoid graphs as their authors published them: `ind.NAME.x`, `.tx`, `.allx`, `.graph`, ...

x, y: training nodes; allx, ally: all nodes but the test ones, the training nodes first; tx, ty: the
test nodes in the order of `test.index`; graph: the neighbours of each node. A y has a row for each
node, with a one in the column of its class.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack  # type: ignore[import-untyped]

from rootfree_lab.data.errors import reading
from rootfree_lab.data.plain_pickle import Made, array_of, fields_of, read_plain, what_is

Arrays = dict[str, NDArray[Any]]

_VALIDATION = 500  # of the nodes after the training ones, as is the custom with these graphs


def has_published_files(folder: Path, name: str) -> bool:
    """Whether the folder has the published files of a graph."""
    return (folder / f"ind.{name}.graph").is_file()


def read_published(folder: Path, name: str) -> Arrays:
    """Features, labels, edges and the split from the published files."""
    parts = {part: _read(folder / f"ind.{name}.{part}", part) for part in _PARTS}
    path = folder / f"ind.{name}.test.index"
    with reading(path):
        order = np.array([int(word) for word in path.read_text().split()], dtype=np.int64)
    with reading(folder / f"ind.{name}.*"):
        return _joined(parts, order)


_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph")


def _joined(parts: dict[str, Any], order: NDArray[np.int64]) -> Arrays:
    (known, width), tested, nodes = parts["allx"].shape, parts["tx"].shape[0], len(parts["graph"])
    if len(order) != tested or order.min() < known or order.max() >= nodes:
        raise ValueError("test.index does not fit the other files")
    # Citeseer has isolated nodes that are in no file: an empty row, and no class.
    rows = vstack([parts["allx"], parts["tx"], csr_matrix((1, width))], format="csr")
    row, labels = np.full(nodes, known + tested), np.full(nodes, -1)
    row[:known], row[order] = np.arange(known), known + np.arange(tested)
    labels[:known], labels[order] = _classes(parts["ally"]), _classes(parts["ty"])
    features = rows[row]
    edges = {(min(a, b), max(a, b)) for a, near in parts["graph"].items() for b in near if a != b}
    train = parts["x"].shape[0]
    return {
        "features": features.toarray().astype(np.float32),
        "labels": labels,
        "edges": np.array(sorted(edges), dtype=np.int64).reshape(-1, 2),
        "train_idx": np.arange(train),
        "val_idx": np.arange(train, min(train + _VALIDATION, known)),
        "test_idx": np.sort(order),
    }


def _classes(hot: NDArray[Any]) -> NDArray[np.int64]:
    # A row of zeros says that a node has no class.
    found: NDArray[np.int64] = np.where(np.asarray(hot).any(1), np.asarray(hot).argmax(1), -1)
    return found


def _matrix(made: Any) -> Any:
    """A matrix in compressed sparse rows."""
    state = fields_of(made, *_MATRICES)
    shape = state["_shape"] if "_shape" in state else state["shape"]
    if not isinstance(shape, tuple) or [type(d) for d in shape] != [int, int]:
        raise ValueError("a matrix has no shape")
    data, indices, starts = (array_of(state[name]) for name in ("data", "indices", "indptr"))
    return sparse_rows(data, indices, starts, shape)


def sparse_rows(data: Any, indices: Any, starts: Any, shape: Iterable[int]) -> Any:
    """The matrix of these arrays; ValueError where they are not those of one."""
    parts = (data, indices.astype(np.int64), starts.astype(np.int64))
    try:
        matrix = csr_matrix(parts, shape=tuple(map(int, shape)))
        matrix.check_format(full_check=True)
        if matrix.nnz != len(data):
            raise ValueError(f"{len(data)} entries, {matrix.nnz} of them in rows")
    except ValueError as error:
        raise ValueError(f"its features are not compressed sparse rows: {error}") from error
    return matrix


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
        return _matrix(made) if part.endswith("x") else array_of(made)
