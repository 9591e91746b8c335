"""The Planetoid citation graphs: the published files, or plain arrays (`cora.npz`, `citeseer.npz`).

`feat_data, feat_indices, feat_indptr, feat_shape`: the features in compressed sparse rows;
`labels`, -1 for none; `edges` (m, 2), undirected, each once; `train_idx, val_idx, test_idx`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rootfree_lab.data.dataset import Dataset, Graph, of_graph
from rootfree_lab.data.errors import existing_folder, reading
from rootfree_lab.data.planetoid_files import has_published_files, read_published, sparse_rows
from rootfree_lab.data.unpacking import check_zip

Arrays = dict[str, NDArray[Any]]

_SPARSE = ("data", "indices", "indptr", "shape")
_FIELDS = ("labels", "edges", "train_idx", "val_idx", "test_idx")


def read_planetoid(folder: Path, name: str) -> Dataset:
    """Read `NAME.npz` of a folder, or the published files, with the standard split.

    Each node's features are divided by their sum, as is usual with these graphs.
    """
    path = existing_folder(folder) / f"{name}.npz"
    raw = next((f for f in _raw_folders(folder, name) if has_published_files(f, name)), None)
    if raw is not None and not path.exists():
        path, arrays = raw, read_published(raw, name)
    else:
        # Without pickle, so that a file cannot run code; the archive has checksums.
        with reading(path):
            check_zip(path)
            with np.load(path, allow_pickle=False) as stored:
                arrays = {field: stored[field] for field in _FIELDS}
                rows = sparse_rows(*(stored[f"feat_{part}"] for part in _SPARSE))
                arrays["features"] = rows.toarray().astype(np.float32)
    with reading(path):
        graph = _graph(arrays)
    return of_graph(name, graph)


def _raw_folders(folder: Path, name: str) -> list[Path]:
    """The folder itself, and where PyTorch Geometric puts the files in it."""
    return [folder, folder / "raw", folder / name.capitalize() / "raw"]


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
