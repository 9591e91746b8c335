"""Optimizers for PyTorch without the square root."""

import importlib
import types

from rootfree.curvature import Curvature, DiagonalCurvature, KroneckerCurvature, SumOfOuterProducts
from rootfree.methods.if_full_adagrad import IFFullAdagrad
from rootfree.methods.if_shampoo import IFShampoo
from rootfree.methods.if_whitening import IFWhitening
from rootfree.methods.rf_adagrad import RFAdagrad
from rootfree.methods.rf_adamw import RFAdamW
from rootfree.methods.rf_full_adagrad import RFFullAdagrad
from rootfree.methods.rf_rmsprop import RFRMSprop
from rootfree.methods.rf_shampoo import RFShampoo
from rootfree.placement.full_state import full_state_dict
from rootfree.placement.sharded import Sharded
from rootfree.recorders import (
    HutchinsonDiagonal,
    KFACRecorder,
    MonteCarloFisherRecorder,
    PerExampleFisherRecorder,
)
from rootfree.shell.batch_size import track_batch_size
from rootfree.shell.diagnostics import Diagnostics, FactorDiagnostics, ParameterDiagnostics
from rootfree.shell.graphed_step import GraphedStep
from rootfree.shell.optimizer import RootFreeOptimizer
from rootfree.shell.parameter_groups import parameter_groups

__version__ = "0.1.0"

__all__ = [
    "Curvature",
    "Diagnostics",
    "DiagonalCurvature",
    "FactorDiagnostics",
    "GraphedStep",
    "HutchinsonDiagonal",
    "IFFullAdagrad",
    "IFShampoo",
    "IFWhitening",
    "KFACRecorder",
    "KroneckerCurvature",
    "MonteCarloFisherRecorder",
    "ParameterDiagnostics",
    "PerExampleFisherRecorder",
    "RFAdagrad",
    "RFAdamW",
    "RFFullAdagrad",
    "RFRMSprop",
    "RFShampoo",
    "RootFreeOptimizer",
    "Sharded",
    "SumOfOuterProducts",
    "full_state_dict",
    "parameter_groups",
    "track_batch_size",
]


def __getattr__(name: str) -> types.ModuleType:
    """`rootfree.timm` is `rootfree.integrations.timm`, imported when it is asked for."""
    if name in ("huggingface", "lightning", "timm"):
        return importlib.import_module(f"rootfree.integrations.{name}")
    raise AttributeError(f"module 'rootfree' has no attribute {name!r}")
