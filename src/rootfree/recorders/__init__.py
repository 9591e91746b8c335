"""Recorders of curvature: contexts around forward and backward that an optimizer then asks."""

from rootfree.recorders.kfac import KFACRecorder

__all__ = ["KFACRecorder"]
