"""The Planetoid citation graphs: the published files, or plain arrays (`cora.npz`, `citeseer.npz`).

Plain arrays. `feat_data, feat_indices, feat_indptr, feat_shape`: the features in compressed sparse
rows; `labels`, -1 for none; `edges` (m, 2), undirected, each once; `train_idx, val_idx, test_idx`.

The published files, `ind.NAME.x`, `.tx`, `.allx`, `.graph`, ... x, y: training nodes; allx, ally:
all nodes but the test ones, the training nodes first; tx, ty: the test nodes in the order of
`test.index`; graph: the neighbours of each node. A y has a row for each node, with a one in the
column of its class.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, vstack  # type: ignore[import-untyped]
from torch import Tensor

from rootfree_lab.data.dataset import Dataset, Graph, of_graph
from rootfree_lab.data.errors import existing_folder, reading
from rootfree_lab.data.plain_pickle import Made, array_of, fields_of, read_plain, what_is
from rootfree_lab.data.unpacking import check_zip

Arrays = dict[str, NDArray[Any]]

_SPARSE = ("data", "indices", "indptr", "shape")
_FIELDS = ("labels", "edges", "train_idx", "val_idx", "test_idx")
_PARTS = ("x", "y", "tx", "ty", "allx", "ally", "graph")
_VALIDATION = 500  # of the nodes after the training ones, as is the custom with these graphs
# One feature in a thousand may be other than zero: of these graphs it is one in a hundred.
_SPARSEST, _LEAST = 1000, 1 << 20
_DEFAULTDICT = "collections.defaultdict"
# Where scipy had the class, in its versions.
_MATRICES = (
    "scipy.sparse.csr.csr_matrix", "scipy.sparse._csr.csr_matrix", "scipy.sparse.csr_matrix",
)  # fmt: skip


def read_planetoid(folder: Path, name: str) -> Dataset:
    """Read `NAME.npz` of a folder, or the published files, with the standard split.

    Each node's features are divided by their sum, as is usual with these graphs.
    """
    path = existing_folder(folder) / f"{name}.npz"
    # The folder itself, and where PyTorch Geometric puts the files in it.
    places = (folder, folder / "raw", folder / name.capitalize() / "raw")
    raw = next((each for each in places if (each / f"ind.{name}.graph").is_file()), None)
    if raw is not None and not path.exists():
        path, arrays = raw, read_published(raw, name)
    else:
        # Without pickle, so that a file cannot run code; the archive has checksums.
        with reading(path):
            check_zip(path)
            with np.load(path, allow_pickle=False) as stored:
                arrays = {field: stored[field] for field in _FIELDS}
                rows = sparse_rows(*(stored[f"feat_{part}"] for part in _SPARSE))
                arrays["features"] = _dense(rows)
    with reading(path):
        graph = _graph(arrays)
    return of_graph(name, graph)


def _graph(arrays: Arrays) -> Graph:
    features = arrays["features"]
    sums = features.sum(1, keepdims=True)
    np.divide(features, sums, out=features, where=sums > 0)
    nodes = len(features)
    labels = arrays["labels"].astype(np.int64)
    edges = arrays["edges"].astype(np.int64)
    if labels.shape != (nodes,) or edges.ndim != 2 or edges.shape[1] != 2:
        raise ValueError("labels and edges do not fit the number of nodes")
    _check_range("edges", edges, nodes)
    parts = {}
    for field in ("train_idx", "val_idx", "test_idx"):
        parts[field] = arrays[field].astype(np.int64)
        _check_range(field, parts[field], nodes)
        if (labels[parts[field]] < 0).any():
            raise ValueError(f"{field} has nodes without a label")
    both = np.concatenate([edges, edges[:, ::-1]]).T
    return Graph(
        torch.from_numpy(features), _tensor(both), _tensor(labels),
        *(_tensor(part) for part in parts.values()),
    )  # fmt: skip


def _check_range(field: str, values: NDArray[np.int64], end: int) -> None:
    if not values.size or values.min() < 0 or values.max() >= end:
        raise ValueError(f"{field} must be in 0 to {end - 1}")


def _tensor(values: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def read_published(folder: Path, name: str) -> Arrays:
    """Features, labels, edges and the split from the published files."""
    parts = {part: _read(folder / f"ind.{name}.{part}", part) for part in _PARTS}
    path = folder / f"ind.{name}.test.index"
    with reading(path):
        order = np.array([int(word) for word in path.read_text().split()], dtype=np.int64)
    with reading(folder / f"ind.{name}.*"):
        return _joined(parts, order)


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
        "features": _dense(features),
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


def _dense(matrix: Any) -> NDArray[np.float32]:
    """A sparse matrix with its zeros; ValueError where a small file would fill the memory."""
    rows, columns = matrix.shape
    if rows * columns > _LEAST + _SPARSEST * matrix.nnz:
        raise ValueError(f"its features are {rows} x {columns} with only {matrix.nnz} not zero")
    dense: NDArray[np.float32] = matrix.toarray().astype(np.float32)
    return dense


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


def _read(path: Path, part: str) -> Any:
    with reading(path):
        made = read_plain(path.read_bytes())
        if part == "graph":
            return _neighbours(made)
        return _matrix(made) if part.endswith("x") else array_of(made)
