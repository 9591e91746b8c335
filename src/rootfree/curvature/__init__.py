"""What the preconditioner is fed with: curvature matrices in forms that are never made dense."""

from rootfree.curvature.outer_product import GradientOuterProduct

__all__ = ["GradientOuterProduct"]
