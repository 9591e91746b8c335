"""The small sets that scikit-learn carries."""

from __future__ import annotations

import numpy as np

from rootfree_lab.data.dataset import Augmentation, Dataset, fixed_permutation, images, tabular


def digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8 pixels, one fifth held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = fixed_permutation(len(found.target))
    # Stored as 0 to 16; times 15 is exact and nearly the range of a byte.
    x = (15 * found.images).astype(np.uint8)[order, :, :, None]
    y = found.target.astype(np.int64)[order]
    held_out = len(y) // 5
    return images(
        "digits",
        (x[held_out:], y[held_out:]),
        (x[:held_out], y[:held_out]),
        classes=10,
        # A digit seen in a mirror is no digit, and an eighth of eight pixels is one.
        augmentation=Augmentation(padding=1, flip=False),
    )


def breast_cancer() -> Dataset:
    """569 tumours with 30 features, malignant or benign."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    return tabular("breast_cancer", found.data, found.target.astype(np.int64), classes=2)


def diabetes() -> Dataset:
    """442 patients with 10 features; the target is the disease's progression, a number."""
    from sklearn.datasets import load_diabetes

    found = load_diabetes()
    return tabular("diabetes", found.data, found.target.astype(np.float64), classes=0)
