"""Which ranks share an optimizer's blocks, and what follows for its state and its steps.

Diagonal methods have no blocks; their ranks agree on steps all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rootfree.layout.tiles import Tile
from rootfree.placement.canonical import saved_rows
from rootfree.placement.homes import Home, description, homes_of, tile_number
from rootfree.placement.placed_stack import PlacedStack
from rootfree.placement.sharded import Sharded
from rootfree.shell.agreement import Agreement
from rootfree.shell.parameter_state import renumber_, working_dtype
from rootfree.shell.said import asked
from rootfree.shell.work import Group, GroupMemory, Work
from rootfree.structures import Structure

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer

PrefixedTile = tuple[str, Tile, tuple[Structure, ...]]


class Placing:
    """What an optimizer knows of other ranks: their agreement, and the homes of its parameters."""

    def __init__(self, option: Sharded | None) -> None:
        self.agreement = Agreement(option)
        self.homes: dict[Tensor, Home] = {}

    def settle(self, optimizer: RootFreeOptimizer, group: Group) -> None:
        """Find the ranks that have a group's parameters, and the owners of the blocks.

        Called before there is any state.  Changes the optimizer.
        """
        agreement = self.agreement
        params = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
        params = [p for p in params if not agreement.knows(p)]
        if params:
            cuts = optimizer._cuts(params, group)
            said = {**description(params, cuts or [[]] * len(params)), **asked(optimizer)}
            ranks = agreement.join(params, group, said, by_blocks=cuts is not None)
            if ranks is not None and cuts is not None:
                divided = optimizer._placement is not None and ranks.world > 1
                self.homes |= homes_of(params, cuts, ranks, at_owners=divided)
        if agreement.is_shared:
            optimizer._watch.over_ranks = agreement.any_

    def keep(self, params: Collection[Tensor]) -> None:
        """Forget all other parameters: the model may have replaced them."""
        self.agreement.keep(params)
        self.homes = {p: home for p, home in self.homes.items() if p in params}

    def _shared(self, p: Tensor) -> Home | None:
        """The home of a parameter whose blocks several ranks own; None: only this one does.

        A single rank steps as on plain tensors, and needs homes only for checkpoints.
        """
        home = self.homes.get(p)
        return None if home is None or home.ranks.world == 1 else home

    def block_state(
        self, p: Tensor, prefix: str, tile: Tile, make: Callable[..., dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The state of the blocks of a tile that this rank owns; `make` makes that of a tile."""
        home = self.homes.get(p)
        if home is None:
            return make(tile=tile)
        number = tile_number(prefix)
        home.check_cut(number, tile)
        blocks = make(tile=home.local_tile(number))
        if "rounding" in blocks:  # the noise of a block does not depend on its owner
            renumber_(blocks["rounding"], home.mine(number))
        return blocks

    def momentum_like(self, p: Tensor) -> Tensor:
        """A tensor with the shape of the momentum: `p`, or the elements that this rank owns."""
        home = self.homes.get(p)
        return p.detach().new_empty(home.my_elements) if home is not None and home.at_owner else p

    def cut_here(self, p: Tensor, cut: list[PrefixedTile]) -> list[PrefixedTile]:
        """The tiles of `p` with the blocks that this rank owns."""
        home = self._shared(p)
        if home is None:
            return cut
        return [
            (prefix, home.local_tile(tile_number(prefix)), structures)
            for prefix, _, structures in cut
            if home.mine(tile_number(prefix))
        ]

    def blocks_here(self, p: Tensor) -> list[Tile] | None:
        """A tile for each block of `p` that this rank owns; None: ranks do not share them."""
        home = self._shared(p)
        return None if home is None else home.single_blocks()

    def stack(
        self, work: Work, memory: GroupMemory, products: Callable[..., torch.dtype]
    ) -> PlacedStack | None:
        """The stack of a work whose blocks ranks share; None: they do not.

        `products`: the dtype of a parameter's products, given its structures and its group.
        """
        params = work.params
        homes = [home for home in map(self._shared, params) if home is not None]
        if not homes:
            return None
        return PlacedStack(
            params,
            homes,
            memory.buckets,
            dtypes=[
                products(p, home.cut[0][1], work.group)
                for p, home in zip(params, homes, strict=True)
            ],
            wide=working_dtype(params[0]),
            where=work.where,
            absent=partial(self.agreement.absent, work.group),
        )

    def saved(self, rows: Mapping[Tensor, Any], numbers: Sequence[int]) -> dict[Tensor, Any]:
        """State in the form of checkpoints; `numbers`: positions of its parameters among all."""
        for ranks in self.agreement.crews:
            ranks.check_agree("state_dict()", {"the parameters": numbers}, about="state_dict()")
        return {**rows, **saved_rows(rows, self.homes)}

    def report(self) -> list[str]:
        """The traffic of this rank, for `summary()`: a line for each group of ranks."""
        lines = []
        for ranks in (each for each in self.agreement.crews if each.world > 1):
            told = ranks.traffic.described(max(self.agreement.steps, 1))
            lines.append(
                f"blocks are shared by {ranks.world} ranks; rank {ranks.ranks[ranks.me]}: {told}"
            )
        return lines
