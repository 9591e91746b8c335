"""All claims, by name, in the order in which they are told."""

from __future__ import annotations

from importlib import import_module

from rootfree_lab.verify.claim import REGISTERED

_FAMILIES = (
    "fisher", "gaussian", "invariances", "directions", "covariance", "first_order", "equalities",
    "precision", "states", "whitening",
)  # fmt: skip

CLAIMS = {
    claim.name: claim
    for family in _FAMILIES
    for claim in REGISTERED[import_module(f"rootfree_lab.verify.{family}").__name__]
}
