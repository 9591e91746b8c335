"""Recorders of curvature: contexts around forward and backward that an optimizer then asks."""

from rootfree.recorders.kfac import KFACRecorder
from rootfree.recorders.per_example import PerExampleFisherRecorder
from rootfree.recorders.sampled import HutchinsonDiagonal, MonteCarloFisherRecorder

__all__ = [
    "HutchinsonDiagonal",
    "KFACRecorder",
    "MonteCarloFisherRecorder",
    "PerExampleFisherRecorder",
]
