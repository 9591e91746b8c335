"""Kronecker factors over one view of a parameter, seen over another view.

A parameter of 24 elements may be preconditioned as (2, 3, 4) while its curvature is a product over
(6, 4) or (2, 12): both lists are cut where their running products meet, (2, 3 | 4) against (6 | 4).
Between two cuts the curvature is one matrix over the axes of the preconditioner there.
"""

from __future__ import annotations

from functools import lru_cache

Groups = tuple[tuple[range, range], ...]


@lru_cache(maxsize=1024)
def regroup(view: tuple[int, ...], axes: tuple[int, ...]) -> Groups:
    """Positions in two factorisations of a number, cut wherever their running products meet.

    >>> regroup((2, 3, 4), (6, 4))
    ((range(0, 2), range(0, 1)), (range(2, 3), range(1, 2)))
    """
    groups = []
    i = j = 0
    while i < len(view) or j < len(axes):
        first_i, first_j = i, j
        ours = theirs = 1
        while i == first_i or j == first_j or ours != theirs:
            if i == first_i or (j > first_j and ours < theirs):
                ours, i = ours * view[i], i + 1
            else:
                theirs, j = theirs * axes[j], j + 1
        # Axes of size one belong to what is before them.
        while j < len(axes) and axes[j] == 1:
            j += 1
        while i < len(view) and view[i] == 1:
            i += 1
        groups.append((range(first_i, i), range(first_j, j)))
    return tuple(groups)
