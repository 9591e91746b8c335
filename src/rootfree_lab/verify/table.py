"""All claims, by name, in the order in which they are told."""

from __future__ import annotations

from rootfree_lab.verify import (
    covariance,
    directions,
    equalities,
    first_order,
    fisher,
    gaussian,
    invariances,
    precision,
    states,
    whitening,
)  # fmt: skip
from rootfree_lab.verify.claim import REGISTERED

_FAMILIES = (
    fisher, gaussian, invariances, directions, covariance, first_order, equalities, precision,
    states, whitening,
)  # fmt: skip

CLAIMS = {claim.name: claim for family in _FAMILIES for claim in REGISTERED[family.__name__]}
