"""Boxes: rectangular sets of elements of a tensor.

A box has a (start, stop) for every axis. Blocks are boxes in the view of a parameter (see
`layout/tiles.py`: axes of size one dropped, neighbours merged). Shards are boxes in its own axes;
`view_boxes` converts them to boxes in the view.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, product

from torch import Tensor

from rootfree.layout.tiles import Tile

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple((0, d) for d in shape)


def box_at(offsets: Sequence[int], shape: Sequence[int]) -> Box:
    """The box of this shape that begins at these offsets."""
    return tuple((start, start + d) for start, d in zip(offsets, shape, strict=True))


def meet(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None: it is empty."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


class Overlaps:
    """Finds the (rank, box) that may overlap a box, without looking at all of them.

    Shards and blocks follow each other along the first axis, or are copies. Sorted by their start,
    they are also sorted by their end.
    """

    def __init__(self, places: Sequence[tuple[int, Box]]) -> None:
        edges = [box[0] if box else (0, 1) for _, box in places]
        order = sorted(range(len(places)), key=lambda n: (edges[n], n))
        self._places = [places[n] for n in order]
        self._starts = [edges[n][0] for n in order]
        # Made ascending, so that a search finds the first that may reach a box.
        self._stops = list(accumulate((edges[n][1] for n in order), max))

    def of(self, box: Box) -> list[tuple[int, Box]]:
        """Those that overlap the box along the first axis."""
        first, last = box[0] if box else (0, 1)
        begin = bisect_right(self._stops, first)
        return self._places[begin : bisect_left(self._starts, last, begin)]


def shape_of(box: Box) -> tuple[int, ...]:
    """The number of elements along every axis."""
    return tuple(stop - start for start, stop in box)


def size_of(box: Box) -> int:
    """The number of elements."""
    return math.prod(shape_of(box))


def part(t: Tensor, outer: Box, inner: Box) -> Tensor:
    """View of `inner` in a tensor that holds `outer`."""
    for axis, ((start, _), (first, last)) in enumerate(zip(outer, inner, strict=True)):
        t = t.narrow(axis, first - start, last - first)
    return t


def chunk(d: int, number: int, count: int) -> tuple[int, int]:
    """The edges of one of `count` parts of an axis, as torch cuts it into chunks."""
    size = -(-d // count)
    return min(number * size, d), min((number + 1) * size, d)


def block_boxes(tile: Tile) -> list[Box]:
    """The boxes of a tile's blocks, in the order in which they are stacked."""
    return [
        tuple(
            (start + i * size, start + (i + 1) * size)
            for i, (start, _, size) in zip(index, tile.runs, strict=True)
        )
        for index in product(*map(range, tile.counts))
    ]


def view_boxes(box: Box, shape: Sequence[int], view: Sequence[int]) -> list[tuple[Box, Box]]:
    """A box of a tensor as boxes of its view, each with the part of the box that it covers.

    It is one box, unless it cuts an axis that the view merges with axes before it.

    >>> view_boxes(((2, 4), (0, 3)), (4, 3), (12,))
    [(((6, 12),), ((2, 4), (0, 3)))]
    >>> [there for there, _ in view_boxes(((0, 2), (1, 3)), (2, 3), (6,))]
    [((1, 3),), ((4, 6),)]
    """
    if any(start >= stop for start, stop in box):
        return []
    found = []
    for runs in product(*(list(_runs(box, shape, dims)) for dims in merged_axes(shape, view))):
        parts = dict(pair for _, fixed in runs for pair in fixed)
        there = tuple(run for run, _ in runs)
        found.append((there, tuple(parts.get(n, edges) for n, edges in enumerate(box))))
    return found


def in_view(
    boxes: Sequence[Box], shape: Sequence[int], view: Sequence[int]
) -> list[tuple[int, Box]]:
    """(rank, box in the view) of the box of each rank."""
    return [(r, there) for r, box in enumerate(boxes) for there, _ in view_boxes(box, shape, view)]


def views_of(t: Tensor, box: Box, shape: Sequence[int], view: Sequence[int]) -> dict[Box, Tensor]:
    """Views of a contiguous tensor that holds a box, by boxes in the view."""
    parts = view_boxes(box, shape, view)
    return {there: part(t, box, sub).view(shape_of(there)) for there, sub in parts}


def _runs(
    box: Box, shape: Sequence[int], dims: list[int]
) -> Iterator[tuple[tuple[int, int], list[tuple[int, tuple[int, int]]]]]:
    """Runs of consecutive elements of merged axes, with the fixed indices of each run."""
    if not dims:
        yield (0, 1), []
        return
    strides = [math.prod(shape[n] for n in dims[k + 1 :]) for k in range(len(dims))]
    cut = max((k for k, n in enumerate(dims) if box[n] != (0, shape[n])), default=0)
    for index in product(*(range(*box[n]) for n in dims[:cut])):
        before = sum(i * stride for i, stride in zip(index, strides[:cut], strict=True))
        start, stop = box[dims[cut]]
        fixed = [(n, (i, i + 1)) for n, i in zip(dims[:cut], index, strict=True)]
        yield (before + start * strides[cut], before + stop * strides[cut]), fixed


def merged_axes(shape: Sequence[int], view: Sequence[int]) -> list[list[int]]:
    """For each axis of a view: the axes of the tensor that it merges.

    >>> merged_axes((64, 1, 3, 7), (64, 21))
    [[0], [2, 3]]
    """
    dims, axes = [n for n, d in enumerate(shape) if d != 1], []
    for d in view:
        mine: list[int] = []
        while math.prod(shape[n] for n in mine) < d:
            mine.append(dims.pop(0))
        axes.append(mine)
    return axes
