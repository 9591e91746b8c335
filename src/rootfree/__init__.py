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
from rootfree.graphs import GraphedStep
from rootfree.optimizer import RootFreeOptimizer
from rootfree.recorders import (
    HutchinsonDiagonal,
    KFACRecorder,
    MonteCarloFisherRecorder,
    PerExampleFisherRecorder,
)
from rootfree.rmsprop import RFRMSprop
from rootfree.shampoo import IFShampoo, RFShampoo

__version__ = "0.1.0.dev0"

__all__ = [
    "Curvature",
    "DiagonalCurvature",
    "GraphedStep",
    "HutchinsonDiagonal",
    "IFFullAdagrad",
    "IFShampoo",
    "KFACRecorder",
    "KroneckerCurvature",
    "MonteCarloFisherRecorder",
    "PerExampleFisherRecorder",
    "RFAdagrad",
    "RFAdamW",
    "RFFullAdagrad",
    "RFRMSprop",
    "RFShampoo",
    "RootFreeOptimizer",
    "SumOfOuterProducts",
    "track_batch_size",
]
