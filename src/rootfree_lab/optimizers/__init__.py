"""Optimizers by name, those of this library, of torch and of other packages."""

from rootfree_lab.optimizers.building import available, build, check, construct, names

__all__ = ["available", "build", "check", "construct", "names"]
