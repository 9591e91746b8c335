"""What the preconditioner is fed with: curvature matrices in forms that are never made dense."""

from rootfree.curvature.diagonal import DiagonalCurvature
from rootfree.curvature.kronecker import KroneckerCurvature
from rootfree.curvature.outer_product import GradientOuterProduct
from rootfree.curvature.protocol import Curvature, ParameterCurvature
from rootfree.curvature.sum_of_outer_products import SumOfOuterProducts

__all__ = [
    "Curvature",
    "DiagonalCurvature",
    "GradientOuterProduct",
    "KroneckerCurvature",
    "ParameterCurvature",
    "SumOfOuterProducts",
]
