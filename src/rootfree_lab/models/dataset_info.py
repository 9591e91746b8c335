"""What a model has to know of the data."""

from __future__ import annotations

from typing import Protocol


class DatasetInfo(Protocol):
    """What a model has to know of the data; a `rootfree_lab.data.Dataset` has it."""

    @property
    def kind(self) -> str: ...

    @property
    def classes(self) -> int:
        """Classes, or the size of the vocabulary; 0 for regression."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example: (C, H, W), (d,), or () for text; of a graph's node (f,)."""
