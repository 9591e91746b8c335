"""Recorders of curvature: contexts around forward and backward that an optimizer then asks."""

from rootfree.recorders.hutchinson import HutchinsonDiagonal
from rootfree.recorders.kfac import KFACRecorder
from rootfree.recorders.monte_carlo import MonteCarloFisherRecorder
from rootfree.recorders.per_example import PerExampleFisherRecorder

__all__ = [
    "HutchinsonDiagonal",
    "KFACRecorder",
    "MonteCarloFisherRecorder",
    "PerExampleFisherRecorder",
]
