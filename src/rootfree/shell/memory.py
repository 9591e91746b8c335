"""Makes the memory of a group: when the group is new, or has changed."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

from torch import Tensor

from rootfree.placement.flattened import flattened
from rootfree.placement.local import is_sharded
from rootfree.shell.checkpoint import bring_state
from rootfree.shell.gradients import form_of, places_of
from rootfree.shell.groups import check_parameters
from rootfree.shell.options import checked_values
from rootfree.shell.work import Group, GroupMemory

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer


def check_shapes(optimizer: RootFreeOptimizer) -> None:
    """Refuse parameters that FSDP1 has flattened, where a step would not be that of one process."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    lost, mode = flattened(params), optimizer._watch.mode
    done = f"FullyShardedDataParallel (FSDP1) flattened {len(lost)} of {len(params)} parameters"
    if lost and optimizer._has_companions:  # a matrix method
        raise ValueError(
            f"params must have the shapes of their layers for {type(optimizer).__name__}, but "
            f"{done} to vectors: no matrix is left to precondition. Use "
            "torch.distributed.fsdp.fully_shard (FSDP2), or a diagonal method"
        )
    if lost and mode != "propagate":
        raise ValueError(
            f"nonfinite must be 'propagate', got {mode!r}: {done}, and a rank sees only its own "
            "part of their gradient, so that some ranks would step and others not. Use "
            "torch.distributed.fsdp.fully_shard (FSDP2) to have such steps left out"
        )


def remember(optimizer: RootFreeOptimizer, group: Group) -> GroupMemory:
    """Complete and lay out a group's state, and remember it.  Changes the optimizer."""
    everything = [p for each in optimizer.param_groups for p in each["params"]]
    check_parameters(everything, set())
    method, options = optimizer._of(group), checked_values(optimizer, group)
    optimizer._placing.settle(optimizer, group)  # some parameters may be new
    check_shapes(optimizer)
    params, state = list(group["params"]), optimizer.state
    _fit_names_(group, optimizer._memories.get(id(group)))
    # Frameworks replace parameters by their shards. State of what is in no group goes.
    known = set(everything)
    for p in [p for p in state if isinstance(p, Tensor) and p not in known]:
        del state[p]
    optimizer._placing.keep(known)
    for p in params:
        state[p] = bring_state(optimizer, p, group)
    rows = [state[p] for p in params]
    sharded = any(map(is_sharded, params))
    places = places_of(params, sharded=sharded)
    memory = GroupMemory(group, form_of(group), params, places, rows, sharded)
    memory.options, memory.names = options, list(group.get("param_names", ()))
    method._lay_out(memory)
    # With at least two keys: itemgetter returns no tuple for one.
    memory.held = [(itemgetter(*row, *list(row)[:1]), row) for row in rows if row]
    memory.tensors = [tensor for get, row in memory.held for tensor in get(row)]
    positions = {p: i for i, p in enumerate(state)}
    where = [positions[p] for p in params]
    memory.entries = itemgetter(*where, *(where or [0])[:1])
    alive = {id(group) for group in optimizer.param_groups}
    kept = {key: known for key, known in optimizer._memories.items() if key in alive}
    # A new dict: the class attribute, shared by all optimizers, must stay empty.
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
