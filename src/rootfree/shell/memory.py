"""Making what is remembered of a group between steps: when it is new, or not as it was."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from torch import Tensor

from rootfree.placement.flattened import check_shapes_are_kept
from rootfree.placement.local import is_sharded
from rootfree.shell.checkpoint import bring_state
from rootfree.shell.gradients import checked_values, form_of, places_of
from rootfree.shell.groups import check_parameters
from rootfree.shell.settling import settle
from rootfree.shell.work import Group, GroupMemory

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer


def check_shapes(optimizer: RootFreeOptimizer) -> None:
    """Refuse parameters that FSDP1 has flattened, where that makes another step of it."""
    check_shapes_are_kept(
        optimizer.param_groups,
        method=type(optimizer).__name__,
        matrices=optimizer._has_companions,
        nonfinite=optimizer._watch.mode,
    )


def remember(optimizer: RootFreeOptimizer, group: Group) -> GroupMemory:
    """Complete a group's state, have it laid out, and remember that.  Changes the optimizer."""
    everything = [p for each in optimizer.param_groups for p in each["params"]]
    check_parameters(everything, set())
    method, options = optimizer._of(group), checked_values(optimizer, group)
    settle(optimizer, group)  # parameters may be new
    check_shapes(optimizer)
    params, state = list(group["params"]), optimizer.state
    _fit_names_(group, optimizer._memories.get(id(group)))
    # Frameworks replace parameters by their shards: what is in no group has no state.
    known = set(everything)
    for p in [p for p in state if isinstance(p, Tensor) and p not in known]:
        del state[p]
    for p in params:
        state[p] = bring_state(optimizer, p, group)
    rows = [state[p] for p in params]
    sharded = any(map(is_sharded, params))
    places = places_of(params, sharded=sharded)
    memory = GroupMemory(group, form_of(group), params, places, rows, sharded)
    memory.options, memory.names = options, list(group.get("param_names", ()))
    method._lay_out(memory)
    # At least two keys, or a getter would give no tuple.
    memory.held = [(itemgetter(*row, *list(row)[:1]), row) for row in rows if row]
    memory.tensors = [tensor for get, row in memory.held for tensor in get(row)]
    positions = {p: i for i, p in enumerate(state)}
    where = [positions[p] for p in params]
    memory.entries = itemgetter(*where, *(where or [0])[:1])
    alive = {id(group) for group in optimizer.param_groups}
    kept = {key: known for key, known in optimizer._memories.items() if key in alive}
    # A new dict, not an entry: the class attribute is the empty start of all optimizers.
    optimizer._memories = {**kept, id(group): memory}
    return memory


def _fit_names_(group: Group, former: GroupMemory | None) -> None:
    """Give parameters that were added or removed without their names as many names as there are.

    Parameters that were there before keep theirs. Checkpoints, too, need one for each.
    """
    names, params = group.get("param_names"), group["params"]
    if names is not None and len(names) != len(params):
        known = {} if former is None else dict(zip(former.params, former.names, strict=False))
        group["param_names"] = [known.get(p, f"unnamed {i}") for i, p in enumerate(params)]
