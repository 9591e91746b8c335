"""What the preconditioner is fed with: curvature matrices in forms that are never made dense."""

from rootfree.curvature.diagonal import DiagonalCurvature
from rootfree.curvature.kronecker import KroneckerCurvature
from rootfree.curvature.outer_products import OuterProducts, SumOfOuterProducts
from rootfree.curvature.protocol import Curvature, ParameterCurvature
from rootfree.curvature.source import CurvatureSource
from rootfree.curvature.stacking import BlockCurvature

__all__ = [
    "BlockCurvature",
    "Curvature",
    "CurvatureSource",
    "DiagonalCurvature",
    "KroneckerCurvature",
    "OuterProducts",
    "ParameterCurvature",
    "SumOfOuterProducts",
]
