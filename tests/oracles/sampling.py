"""Random problems and the measure of agreement that the tests of the oracles share."""

from __future__ import annotations

import numpy as np

EXACT = 1e-12  # float64 round-off of a few dozen products of small, well-conditioned matrices


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def positive_definite(d: int, seed: int) -> np.ndarray:
    x = rng(seed).normal(size=(d, d))
    return np.eye(d) + x @ x.T / d


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """‖a - b‖ / ‖b‖."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))
