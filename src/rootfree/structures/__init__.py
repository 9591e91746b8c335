"""Structured factors: d×d matrices kept as one packed tensor. See `base` for the laws."""

from rootfree.structures.base import (
    Dense,
    Structure,
    frobenius_norm,
    matricise,
    multiply_axis,
    per_block,
)
from rootfree.structures.block_diagonal import BlockDiagonal
from rootfree.structures.diagonal import Diagonal
from rootfree.structures.hierarchical import Hierarchical
from rootfree.structures.parse import make_structure
from rootfree.structures.toeplitz import LowerToeplitz, UpperToeplitz
from rootfree.structures.triangular import LowerTriangular, UpperTriangular

__all__ = [
    "BlockDiagonal",
    "Dense",
    "Diagonal",
    "Hierarchical",
    "LowerToeplitz",
    "LowerTriangular",
    "Structure",
    "UpperToeplitz",
    "UpperTriangular",
    "frobenius_norm",
    "make_structure",
    "matricise",
    "multiply_axis",
    "per_block",
]
