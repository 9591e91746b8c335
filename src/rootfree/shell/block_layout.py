"""The state of a group as stacks of equal blocks, and the stacks that a step works on.

The former is made when a group changes, the latter also when other parameters have gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from rootfree.kernels.fused_stack import FusedStack
from rootfree.kernels.halves import halves_of, pack_
from rootfree.kernels.plan import Plan, Structures, kernels_run, make_plan
from rootfree.kernels.stack import Stack
from rootfree.layout.buckets import Bucket, Slot
from rootfree.shell.parameter_state import working_dtype
from rootfree.shell.step_counts import lay_out_counts
from rootfree.shell.work import Group, GroupMemory, Work

if TYPE_CHECKING:
    from rootfree.shell.block_optimizer import BlockOptimizer


def lay_out(optimizer: BlockOptimizer, memory: GroupMemory) -> None:
    """Stack the state into slabs in the form of their plans; state[p] gets views of them."""
    pairs, placing, group = optimizer._pairs, optimizer._placing, memory.group
    found: dict[Any, Bucket[Plan]] = {}
    for p in memory.params:
        for prefix, tile, structures in placing.cut_here(p, optimizer._cut(p, group)):
            key = (p.device, p.dtype, tile.sizes, structures)
            if key not in found:
                found[key] = Bucket(structures, _plan(optimizer, p, structures, group))
            found[key].slots.append(Slot(p, tile, prefix, pairs.pieces_of(p, tile)))
    memory.buckets = list(found.values())
    for bucket in memory.buckets:
        rows = []
        for slot in bucket.slots:
            state = optimizer.state[slot.p]
            keys = [key for key in state if key.startswith(slot.prefix)]
            mine = {key.removeprefix(slot.prefix): state.pop(key) for key in keys}
            rows.append(mine)
        factors = pack_(rows) if bucket.plan.halves else {}
        bucket.adopt(rows)
        views = bucket.views()
        for name, both in factors.items():
            bucket.slabs |= halves_of(name, both)
            parts = both.split([slot.tile.blocks for slot in bucket.slots], dim=1)
            for view, part in zip(views, parts, strict=True):
                view[name] = part
        for slot, view in zip(bucket.slots, views, strict=True):
            optimizer.state[slot.p].update({slot.prefix + name: t for name, t in view.items()})
    where = {p: i for i, p in enumerate(memory.params)}
    owners = {i: where[pairs.owner(p)] for p, i in where.items()}
    memory.owners = {i: owner for i, owner in owners.items() if i != owner}
    lay_out_counts(memory, clock=True)


def _plan(optimizer: BlockOptimizer, p: Tensor, structures: Structures, group: Group) -> Plan:
    given = optimizer._curvature is not None
    return make_plan(
        p,
        structures,
        group,
        fused=kernels_run(p, optimizer._fused),
        dtype=optimizer._products(p, structures, group),
        direction=optimizer._direction,
        kernel=None if given and not optimizer._kernel_takes_curvature else optimizer._kernel,
        given=given,
    )


def stacks_of(optimizer: BlockOptimizer, work: Work) -> list[tuple[list[int], Stack]]:
    """Stacks for the work's parameters; those with kernels have one dtype each."""
    memory = optimizer._memories[id(work.group)]
    ps = work.params
    if stack := optimizer._placing.stack(work, memory, optimizer._products):
        return [([*range(len(ps))], stack)]
    present = set(ps)
    alike: dict[Any, list[Bucket[Plan]]] = {}
    for bucket in memory.buckets:
        if any(piece.p in present for slot in bucket.slots for piece in slot.pieces):
            plan = bucket.plan
            alike.setdefault(plan.dtype if plan.fused else None, []).append(bucket)
    stacks: list[tuple[list[int], Stack]] = []
    for buckets in alike.values():
        members = {q.p for bucket in buckets for slot in bucket.slots for q in slot.pieces}
        where = [i for i, p in enumerate(ps) if p in members]
        mine = [ps[i] for i in where]
        if buckets[0].plan.fused:
            replays, given = optimizer._replays(mine[0]), optimizer._curvature is not None
            stacks.append((where, FusedStack(mine, buckets, replays, given=given)))
        else:
            stacks.append((where, Stack(mine, buckets, wide=working_dtype(mine[0]))))
    return stacks
