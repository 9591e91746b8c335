"""What the preconditioner is fed with: curvature matrices in forms that are never made dense."""

from rootfree.curvature.blocks import BlockCurvature
from rootfree.curvature.diagonal import DiagonalCurvature
from rootfree.curvature.kronecker import KroneckerCurvature
from rootfree.curvature.outer_product import GradientOuterProduct
from rootfree.curvature.protocol import Curvature, ParameterCurvature
from rootfree.curvature.source import CurvatureSource
from rootfree.curvature.sum_of_outer_products import SumOfOuterProducts

__all__ = [
    "BlockCurvature",
    "Curvature",
    "CurvatureSource",
    "DiagonalCurvature",
    "GradientOuterProduct",
    "KroneckerCurvature",
    "ParameterCurvature",
    "SumOfOuterProducts",
]
