"""What a matrix method keeps of the ranks that share its blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rootfree.kernels.halves import joined
from rootfree.layout.tiles import Tile
from rootfree.placement.canonical import mismatches, owned_rows, saved_rows
from rootfree.placement.homes import Home, description, settle, tile_number
from rootfree.placement.owners import Cut
from rootfree.placement.placed_stack import Absent, PlacedStack
from rootfree.placement.ranks import PROBLEM, Ranks
from rootfree.placement.sharded import Sharded, sharing_ranks
from rootfree.shell.checkpoint_matching import StateMismatchError, match_state_dict
from rootfree.shell.parameter_state import renumber_, working_dtype
from rootfree.shell.work import GroupMemory, Work
from rootfree.structures import Structure

if TYPE_CHECKING:
    from rootfree.shell.block_optimizer import BlockOptimizer

Group = dict[str, Any]
PrefixedTile = tuple[str, Tile, tuple[Structure, ...]]
_NONE: Absent = frozenset()
_ADDING = "adding a parameter group"
_PLAIN = (bool, int, float, str, tuple, torch.dtype, type(None))


class Placing:
    """The homes of parameters, and the groups of ranks that share them."""

    def __init__(self, option: Sharded | None) -> None:
        self._option = option
        self._crews: dict[tuple[int, ...], Ranks] = {}
        self._absent: dict[int, Absent] = {}  # by id of the group
        self.homes: dict[Tensor, Home] = {}
        self.shares = False  # whether any of them is shared with another rank
        self.steps = 0

    @property
    def crews(self) -> list[Ranks]:
        """The groups of ranks that there are."""
        return list(self._crews.values())

    def settle(self, params: Sequence[Tensor], group: Group, cut: Callable[[Tensor], Cut]) -> None:
        """Find homes for the parameters of a group, if ranks share them. All ranks must ask."""
        params = [p for p in params if p not in self.homes]
        if not params:
            return
        sharing = sharing_ranks(self._option, params)
        if sharing is None:
            return
        cuts = [cut(p) for p in params]
        said = {**description(params, cuts), **_plain(group), **self._asked(group)}
        everyone = self._crews.get(tuple(sharing.everyone)) or Ranks(sharing.everyone)
        everyone.check_agree(_ADDING, said, about="a parameter group")
        same = sharing.crew == sharing.everyone
        ranks = everyone if same else self._crews.get(tuple(sharing.crew)) or Ranks(sharing.crew)
        divided = self._option is not None and ranks.world > 1
        self.homes |= settle(params, cuts, ranks, at_owners=divided)
        self._crews[tuple(sharing.crew)] = ranks
        self.shares = self.shares or ranks.world > 1

    def _asked(self, group: Group) -> dict[str, Any]:
        """What was asked for beside options that are numbers and names."""
        names = [p[0] for p in group["params"] if isinstance(p, tuple)]
        option = self._option and f"Sharded(replicas={self._option.replicas})"
        return {"the names of the parameters": names, "placement": option}

    def refuse(self, params: Sequence[Any], problem: Exception) -> None:
        """Tell the ranks that wait for this one, if any do, why it does not add its group."""
        tensors = [p[1] if isinstance(p, tuple) else p for p in params]
        try:
            sharing = sharing_ranks(self._option, [p for p in tensors if isinstance(p, Tensor)])
        except ValueError:  # the first problem is told
            return
        if sharing is not None:
            Ranks(sharing.everyone).differ(_ADDING, {PROBLEM: str(problem)})

    def _shared(self, p: Tensor) -> Home | None:
        """The home of a parameter whose blocks other ranks own too.

        Alone, a rank takes steps like those on plain tensors; homes are there for checkpoints.
        """
        home = self.homes.get(p) if self.shares else None
        return None if home is None or home.ranks.world == 1 else home

    def block_state(
        self, p: Tensor, prefix: str, tile: Tile, make: Callable[..., dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """The state of those blocks of a tile that are owned here; `make` makes it for a tile."""
        home = self.homes.get(p)
        if home is None:
            return make(tile=tile)
        number = tile_number(prefix)
        home.check_cut(number, tile)
        blocks = make(tile=home.local_tile(number))
        if "rounding" in blocks:  # the noise of a block is the same wherever it is
            renumber_(blocks["rounding"], home.mine(number))
        return blocks

    def momentum_like(self, p: Tensor) -> Tensor:
        """What the momentum of `p` is laid out like: `p`, or the elements that are owned here."""
        home = self.homes.get(p)
        return p.detach().new_empty(home.my_elements) if home is not None and home.at_owner else p

    def cut_here(self, p: Tensor, cut: list[PrefixedTile]) -> list[PrefixedTile]:
        """The tiles of `p` with the blocks that are owned here."""
        home = self._shared(p)
        if home is None:
            return cut
        return [
            (prefix, home.local_tile(tile_number(prefix)), structures)
            for prefix, _, structures in cut
            if home.mine(tile_number(prefix))
        ]

    def blocks_here(self, p: Tensor) -> list[Tile] | None:
        """A tile for each block of `p` that is owned here; None: ranks do not share them."""
        home = self._shared(p)
        if home is None:
            return None
        return [tile for number in range(len(home.cut)) for tile in home.single_blocks(number)]

    def agree(self, groups: Sequence[Group], counts: Sequence[list[int]]) -> dict[int, list[int]]:
        """Before a step: the positions, by id of the group, whose gradients other ranks have.

        `counts`: of the steps of each group's parameters. Ranks that have other options, or counts,
        get an error.
        """
        elsewhere: dict[int, list[int]] = {}
        self._absent, self.steps = {}, self.steps + 1
        options = [
            {**_plain(group), "step": steps} for group, steps in zip(groups, counts, strict=True)
        ]
        for ranks in self._crews.values():
            mine = [g for g in groups if any(self._is_of(p, ranks) for p in g["params"])]
            seen = [[p.grad is not None for p in group["params"]] for group in mine]
            found = ranks.differ("step()", (options, seen))
            if found is None:
                continue
            ranks.check_alike([_labelled(each) for each, _ in found], about="step()")
            for n, group in enumerate(mine):
                table = [patterns[n] for _, patterns in found]
                some = [i for i, flags in enumerate(zip(*table, strict=True)) if any(flags)]
                self._absent[id(group)] = frozenset(
                    (i, r) for i in some for r, flags in enumerate(table) if not flags[i]
                )
                elsewhere[id(group)] = [i for i in some if not seen[n][i]]
        return elsewhere

    def _is_of(self, p: Tensor, ranks: Ranks) -> bool:
        return p in self.homes and self.homes[p].ranks is ranks

    def absent(self, group: Group) -> Absent:
        """What is missing of a group's gradients in this step, and where."""
        return self._absent.get(id(group), _NONE)

    def stack(
        self, work: Work, memory: GroupMemory, products: Callable[..., torch.dtype]
    ) -> PlacedStack | None:
        """The stack of a work whose blocks ranks share; None: they do not.

        `products`: the dtype of a parameter's products, given its structures and its group.
        """
        params = [work.group["params"][i] for i in work.where]
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
            absent=partial(self.absent, work.group),
        )

    def saved(self, params: Sequence[Tensor], rows: Mapping[Any, Any]) -> dict[Any, Any]:
        """State in the form of checkpoints; rows by the number of the parameter.

        Rows under other keys are not of parameters.
        """
        numbers = [n for n in range(len(params)) if n in rows]
        for ranks in self.crews:
            ranks.check_agree("state_dict()", {"the parameters": numbers}, about="state_dict()")
        found = saved_rows({params[n]: rows[n] for n in numbers}, self.homes)
        return {**rows, **{n: found.get(params[n], rows[n]) for n in numbers}}

    def taken(
        self, like: Mapping[Tensor, Any], given: Mapping[Tensor, Any], problem: Exception | None
    ) -> dict[Tensor, dict[str, Tensor]]:
        """What of a checkpoint's rows belongs here, in the form of `like`.

        `problem`: why the checkpoint does not fit, where that is known already.
        """
        if problem is None:
            problem = next(map(StateMismatchError, mismatches(like, self.homes, given)), None)
        for ranks in self.crews:
            found = ranks.differ("load_state_dict()", None if problem is None else str(problem))
            others = [text for text in found or [] if text is not None]
            if problem is None and others:
                problem = StateMismatchError(others[0])
        if problem is not None:
            raise problem
        return owned_rows(like, self.homes, given)

    def report(self) -> list[str]:
        """What this rank exchanges, for `summary()`: a line for each group of ranks."""
        lines = []
        for ranks in (each for each in self.crews if each.world > 1):
            told = ranks.traffic.described(max(self.steps, 1))
            lines.append(
                f"blocks are shared by {ranks.world} ranks; rank {ranks.ranks[ranks.me]}: {told}"
            )
        return lines


def _plain(group: Group) -> dict[str, Any]:
    """The options of a group that ranks can compare, and hosts look at without waiting.

    Keys that are not ours may hold anything; what they hold of the plain kinds is compared too.
    """
    return {
        name: value
        for name, value in group.items()
        if name not in ("params", "param_names") and isinstance(value, _PLAIN)
    }


def _labelled(groups: Sequence[Group]) -> Group:
    """The options of all groups, by name and number of the group."""
    return {
        f"{name} of parameter group {n}": value
        for n, group in enumerate(groups)
        for name, value in group.items()
    }


def brought(
    optimizer: BlockOptimizer, placing: Placing, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """A checkpoint with rows of what belongs here. Changes nothing; all ranks must ask."""
    like: dict[Tensor, Any] = {}
    given: dict[Tensor, Any] = {}
    rows_of: dict[int, Tensor] = {}
    problem = None
    try:
        matched = match_state_dict(
            optimizer.param_groups, state_dict, method=type(optimizer).__name__
        )
        for group, saved, rows in matched:
            values = {**group, **saved}
            method = optimizer._of(values)
            values.update(method._checked_options(values))
            for p, row in zip(group["params"], rows, strict=True):
                if row is not None:
                    like[p], given[p] = method._init_state(p, values), joined(row)
                    rows_of[id(row)] = p
    except (ValueError, TypeError, RuntimeError) as error:
        problem = error
    found = placing.taken(like, given, problem)
    state = {
        key: found[rows_of[id(row)]] if id(row) in rows_of else row
        for key, row in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
