"""Moving boxes between ranks, by one all-to-all with exact sizes.

Where elements go in the buffers is computed once, from shapes and strides. A step makes one view
for each piece, and copies all of them at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rootfree.placement.boxes import Box, shape_of, size_of
from rootfree.placement.processes import exchange_device
from rootfree.placement.routes import Key, Leg, Route
from rootfree.placement.traffic import Traffic


class Piece(NamedTuple):
    """A view of a tensor that need not exist yet, relative to the beginning of the tensor."""

    number: int  # of the tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The view."""
        t = tensors[self.number]
        return t.as_strided(self.size, self.stride, t.storage_offset() + self.offset)

    def part(self, outer: Box, inner: Box) -> Piece:
        """The view of `inner`, given that of `outer`."""
        ahead = [
            (first - start) * stride
            for (start, _), (first, _), stride in zip(outer, inner, self.stride, strict=True)
        ]
        return self._replace(size=shape_of(inner), offset=self.offset + sum(ahead))


Pieces = Mapping[tuple[Key, Box], Piece]


def stand_in(shape: Sequence[int]) -> Tensor:
    """A contiguous tensor without memory."""
    return torch.empty(shape, device="meta")


def piece_of(number: int, view: Tensor) -> Piece:
    """The piece of the tensor with this number, given a view of a stand-in for the tensor."""
    return Piece(number, tuple(view.shape), view.stride(), int(view.storage_offset()))


class Exchange:
    """A route between tensors of known shapes and strides, for numbers of one dtype."""

    def __init__(
        self, route: Route, have: Pieces, want: Pieces, *, dtype: torch.dtype,
        device: torch.device, group: Any,
    ) -> None:  # fmt: skip
        """`group`: the processes; None: no rank sends anything, and none waits."""
        outgoing = [leg for legs in route.sent for leg in legs]
        incoming = [leg for legs in route.received for leg in legs]
        self._out, self._in = _cuts(have, outgoing), _cuts(want, incoming)
        self._out_like, self._in_like = (
            [stand_in(shape_of(leg.cut)) for leg in legs] for legs in (outgoing, incoming)
        )
        self._kept = (
            _cuts(have, [source for source, _ in route.kept]),
            _cuts(want, [target for _, target in route.kept]),
        )
        self._holes = [want[key, box] for key, box in route.holes]
        self._sizes = [
            [sum(size_of(leg.cut) for leg in legs) for legs in way]
            for way in (route.received, route.sent)
        ]
        self._dtype, self._device = dtype, device
        self._group = group

    def keep_(self, have: Sequence[Tensor], want: Sequence[Tensor]) -> None:
        """Copy what this rank has itself; zeros for what no rank has.  Changes want."""
        for hole in self._holes:
            hole.of(want).zero_()
        _copy_(_views(self._kept[1], want), _views(self._kept[0], have))

    def start(self, have: Sequence[Tensor], traffic: Traffic, what: str) -> Flight:
        """Send what others want; `have` may change as soon as this returns.  Changes traffic."""
        come, out = (
            torch.empty(sum(sizes), dtype=self._dtype, device=self._device) for sizes in self._sizes
        )
        _copy_(_spaces(out, self._out_like), _views(self._out, have))
        if self._group is None:
            return Flight(self, lambda: come, traffic)
        traffic.count(what, sent=out.nbytes, received=come.nbytes)
        return Flight(self, _all_to_all(come, out, self._sizes, self._group), traffic)

    def unpack_(self, come: Tensor, want: Sequence[Tensor]) -> None:
        """Copy what was received to its place.  Changes want."""
        _copy_(_views(self._in, want), _spaces(come, self._in_like))


class Flight(NamedTuple):
    """An exchange under way; it keeps the buffers alive."""

    exchange: Exchange
    wait: Callable[[], Tensor]
    traffic: Traffic

    def land_(self, want: Sequence[Tensor]) -> None:
        """Wait for what others sent, and copy it to its place.  Changes want and traffic."""
        begun = time.perf_counter()
        come = self.wait()
        self.traffic.waited += time.perf_counter() - begun
        self.exchange.unpack_(come, want)


def move(
    route: Route, have: Mapping[tuple[Key, Box], Tensor], want: Mapping[tuple[Key, Box], Tensor],
    *, dtype: torch.dtype, device: torch.device, group: Any,
) -> None:  # fmt: skip
    """One exchange between existing tensors.  Changes `want`."""
    exchange = Exchange(
        route, _pieces(have), _pieces(want), dtype=dtype, device=device, group=group
    )
    flight = exchange.start([*have.values()], Traffic(), "")
    exchange.keep_([*have.values()], [*want.values()])
    flight.land_([*want.values()])


def _pieces(tensors: Mapping[tuple[Key, Box], Tensor]) -> Pieces:
    numbered = enumerate(tensors.items())
    return {at: Piece(n, tuple(t.shape), t.stride(), 0) for n, (at, t) in numbered}


def _cuts(pieces: Pieces, legs: Iterable[Leg]) -> list[Piece]:
    return [pieces[leg.key, leg.box].part(leg.box, leg.cut) for leg in legs]


def _spaces(buffer: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Consecutive views of a buffer, in the shapes of stand-ins."""
    return list(torch._C._nn.unflatten_dense_tensors(buffer, like)) if like else []


def _views(pieces: Sequence[Piece], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [piece.of(tensors) for piece in pieces]


def _copy_(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)


def _all_to_all(come: Tensor, out: Tensor, sizes: list[list[int]], group: Any) -> Any:
    """Start the exchange; the returned function waits for it and returns what was received."""
    if len(sizes[0]) == 1:
        return lambda: come
    device = exchange_device(group, out.device)
    there, here = (out, come) if device == out.device else (
        out.to(device), torch.empty_like(come, device=device)
    )  # fmt: skip
    # As bytes: not every backend supports every dtype.
    width = out.element_size()
    bytes_in, bytes_out = ([n * width for n in each] for each in sizes)
    work = torch.distributed.all_to_all_single(
        here.view(torch.uint8), there.view(torch.uint8), bytes_in, bytes_out, group=group,
        async_op=True,
    )  # fmt: skip

    def wait() -> Tensor:
        work.wait()
        return here.to(come.device)

    return wait
