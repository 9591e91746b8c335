"""The grid of the law suite, and the tensors of one case."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rootfree.structures import Structure, make_structure

from .patterns import Oracle, oracle

# With the sizes below, k of the sized ones is less than d, d and more than d; 17 is prime, so that
# the last block is smaller, by one element to seven of eight.
NAMES = [
    "dense",
    "diagonal",
    "block_diagonal:3",
    "block_diagonal:5",
    "block_diagonal:8",
    "lower_triangular",
    "upper_triangular",
    "hierarchical:3",
    "hierarchical:5",
    "hierarchical:8",
    "lower_toeplitz",
    "upper_toeplitz",
]
SIZES = [1, 5, 17]
BLOCKS = 3
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """Random packed K, M and X (b, d, r) of a dtype, and their exact values as dense float64."""

    name: str
    d: int
    b: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name}-d{self.d}-b{self.b}-{str(self.dtype).removeprefix('torch.')}"

    @cached_property
    def structure(self) -> Structure:
        return make_structure(self.name, self.d)

    @cached_property
    def oracle(self) -> Oracle:
        return oracle(self.name, self.d)

    @cached_property
    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(str(self).encode()))

    def _rounded(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).double()

    @cached_property
    def K_dense(self) -> Tensor:
        return self._rounded(self.oracle.random(self.b, self._generator))

    @cached_property
    def M_dense(self) -> Tensor:
        return self._rounded(self.oracle.random(self.b, self._generator))

    @cached_property
    def X_dense(self) -> Tensor:
        r = self.d // 2 + 1
        X = torch.randn(self.b, self.d, r, dtype=torch.float64, generator=self._generator)
        return self._rounded(X)

    @property
    def K(self) -> Tensor:
        return self.structure.pack(self.K_dense.to(self.dtype))

    @property
    def M(self) -> Tensor:
        return self.structure.pack(self.M_dense.to(self.dtype))

    @property
    def X(self) -> Tensor:
        return self.X_dense.to(self.dtype)


CASES = list(itertools.starmap(Case, itertools.product(NAMES, SIZES, [BLOCKS], DTYPES)))
EXACT_CASES = [case for case in CASES if case.dtype == torch.float64]
