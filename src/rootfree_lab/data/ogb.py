"""ogbn-products as the Open Graph Benchmark distributes it: gzipped tables of numbers.

`raw/`: edge (each undirected edge once), node-feat, node-label, num-node-list and num-edge-list;
`split/sales_ranking/`: train, valid and test, the numbers of their nodes. All are `*.csv.gz`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rootfree_lab.data.dataset import Dataset, Graph, of_graph
from rootfree_lab.data.errors import existing_folder, reading
from rootfree_lab.data.unpacking import Counted

_BLOCK = 1 << 26  # characters that are parsed at a time
_LONGEST = 1 << 16  # characters of a line


def read_ogbn_products(folder: Path) -> Dataset:
    """Read a folder with `raw/` and `split/sales_ranking/`; features stay as they are."""
    folder = existing_folder(folder, "products", "ogbn_products")
    raw, split = folder / "raw", folder / "split" / "sales_ranking"
    nodes, edge_count = (
        int(_table(raw / f"num-{what}-list", rows=1, columns=1)[0, 0]) for what in ("node", "edge")
    )
    features = _table(raw / "node-feat", rows=nodes, dtype=np.float32)
    labels = _table(raw / "node-label", rows=nodes, columns=1)[:, 0]
    edges = _table(raw / "edge", rows=edge_count, columns=2, below=nodes)
    parts = [
        torch.from_numpy(_table(split / name, columns=1, below=nodes)[:, 0])
        for name in ("train", "valid", "test")
    ]
    one_way = torch.from_numpy(edges).T
    graph = Graph(
        torch.from_numpy(features),
        torch.cat([one_way, one_way.flip(0)], 1),
        torch.from_numpy(labels),
        *parts,
    )
    return of_graph("ogbn_products", graph)


def _table(
    path: Path,
    *,
    rows: int | None = None,
    columns: int | None = None,
    below: int | None = None,
    dtype: Any = np.int64,
) -> NDArray[Any]:
    """A table of numbers, (rows, columns), each in 0 to `below` - 1; what is None is as found."""
    path = path.with_name(f"{path.name}.csv.gz")
    with reading(path):
        with Counted(path) as file:
            first = file.readline(_LONGEST)
            found = first.count(b",") + 1
            blocks = [_numbers(first, found, dtype)]
            while block := file.read(_BLOCK):
                blocks.append(_numbers(block + file.readline(_LONGEST), found, dtype))
        table = np.concatenate(blocks)
        if len(table) != (rows or len(table)) or found != (columns or found):
            wanted = f"{rows or 'n'} x {columns or 'm'}"
            raise ValueError(f"it has {len(table)} x {found} numbers, not {wanted}")
        if below is not None and not (table.min() >= 0 and table.max() < below):
            raise ValueError(f"its numbers must be in 0 to {below - 1}")
    return table


def _numbers(text: bytes, columns: int, dtype: Any) -> NDArray[Any]:
    """The numbers of whole lines: (lines, columns)."""
    # numpy's reader of tables takes minutes for a hundred million numbers, this one seconds.
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy before 2.3 only warns of what is not a number
        try:
            values = np.fromstring(text.replace(b"\n", b",").decode("ascii"), dtype, sep=",")
        except DeprecationWarning as error:
            raise ValueError("it has something that is not a number") from error
    lines = text.count(b"\n") + (not text.endswith(b"\n"))
    if values.size != lines * columns:
        raise ValueError(f"{values.size} numbers in {lines} rows of {columns}")
    return values.reshape(-1, columns)
