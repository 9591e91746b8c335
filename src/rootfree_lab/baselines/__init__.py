"""What the root-free methods are compared with: methods with the root, and ablations."""

from rootfree_lab.baselines.ablations import without_batch_size, zero_initialised
from rootfree_lab.baselines.root_based import FullAdagrad, Shampoo

__all__ = ["FullAdagrad", "Shampoo", "without_batch_size", "zero_initialised"]
