"""Optimizers for PyTorch without the square root."""

from rootfree.adagrad import RFAdagrad
from rootfree.adamw import RFAdamW
from rootfree.batch_size import track_batch_size
from rootfree.curvature import (
    Curvature,
    DiagonalCurvature,
    KroneckerCurvature,
    SumOfOuterProducts,
)
from rootfree.full_matrix import IFFullAdagrad, RFFullAdagrad
from rootfree.optimizer import RootFreeOptimizer
from rootfree.rmsprop import RFRMSprop
from rootfree.shampoo import IFShampoo, RFShampoo

__version__ = "0.1.0.dev0"

__all__ = [
    "Curvature",
    "DiagonalCurvature",
    "IFFullAdagrad",
    "IFShampoo",
    "KroneckerCurvature",
    "RFAdagrad",
    "RFAdamW",
    "RFFullAdagrad",
    "RFRMSprop",
    "RFShampoo",
    "RootFreeOptimizer",
    "SumOfOuterProducts",
    "track_batch_size",
]
