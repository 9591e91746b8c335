"""Real data sets, in memory: a registry, the loaders of their standard files, a cache, batches."""

from rootfree_lab.data.batches import Batches
from rootfree_lab.data.dataset import Augmentation, Dataset, Graph, Split, images, tabular
from rootfree_lab.data.errors import DataError
from rootfree_lab.data.loading import fetch, load, status
from rootfree_lab.data.registry import names

__all__ = [
    "Augmentation", "Batches", "DataError", "Dataset", "Graph", "Split", "fetch", "images", "load",
    "names", "status", "tabular",
]  # fmt: skip
