"""Files as their authors published them, at the addresses that torchvision and PyG know.

Their downloaders are left aside: torchvision's falls back to a connection that is not encrypted,
PyTorch Geometric's does not look at certificates, and the data sets of both unpickle what they get.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

from rootfree_lab.data.cache import checksum
from rootfree_lab.data.errors import DataError, reading
from rootfree_lab.data.unpacking import unpack_tar
from rootfree_lab.torchvision_shim import make_importable

_TIMEOUT_S = 60  # without a byte

Files = list[tuple[str, str]]  # address, and MD5 where one is published


@dataclass(frozen=True)
class Published:
    """The addresses of a data set's files, and what of them is kept."""

    entry: str  # in the cache
    files: Callable[[], Files]
    keep: tuple[str, ...] = ()  # patterns of paths inside an archive; none: files as they are

    def unpack(self, work: Path, target: Path) -> None:
        """Download into the folder `work`, and put what is kept into the folder `target`."""
        try:
            files = self.files()
        except (ImportError, RuntimeError) as error:  # not installed, or for another torch
            raise DataError(
                f"its addresses come with a package that cannot be imported ({error}): "
                "pip install 'rootfree[lab]'."
            ) from error
        for address, md5 in files:
            path = work / address.rpartition("/")[2]
            _download(address, path)
            with reading(path):
                if md5 and checksum(path, "md5") != md5:
                    raise DataError(f"{address} is altered: it has another checksum than {md5}.")
                if self.keep:
                    unpack_tar(path, self.keep, target)
                else:
                    os.replace(path, target / path.name)


def _download(address: str, path: Path) -> None:
    try:
        request = Request(address, headers={"User-Agent": "rootfree"})
        with urlopen(request, timeout=_TIMEOUT_S) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)
    except (OSError, HTTPException) as error:  # no network, no such file, a line that breaks
        raise DataError(f"{address} could not be downloaded ({error}).") from error


def cifar(name: str) -> Files:
    """CIFAR10 or CIFAR100."""
    make_importable()
    from torchvision import datasets  # type: ignore[import-untyped]

    known = getattr(datasets, name)
    return [(known.url, known.tgz_md5)]


def fashion_mnist() -> Files:
    """The four idx files."""
    make_importable()
    from torchvision.datasets import FashionMNIST  # type: ignore[import-untyped]

    return [(FashionMNIST.mirrors[0] + name, md5) for name, md5 in FashionMNIST.resources]


def planetoid(name: str) -> Files:
    """The parts of a citation graph."""
    from torch_geometric.datasets import Planetoid  # type: ignore[import-untyped]

    parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    return [(f"{Planetoid.url}/ind.{name}.{part}", "") for part in parts]
