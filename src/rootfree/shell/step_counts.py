"""How often parameters were updated, and the clock of their refreshes.

A step with a gradient that is not finite is skipped, and does not count. Where the host decides
that, `state[p]["step"]` is both numbers. On a GPU the host does not know, and there are two.
`state[p]["step"]` is on the device and counts updates. The clock is on the host, counts attempted
steps, and decides when to refresh. Checkpoints contain it where it differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from rootfree.kernels.block_table import as_table
from rootfree.shell import gradients
from rootfree.shell.work import GroupMemory, Work

CLOCK = "refresh_clock"
# Stands for a count that nobody kept, past the start of any method.
LONG_AGO = 2**31


def first_count(p: Tensor) -> Tensor:
    """A count of zero updates, on the device that counts those of `p`."""
    where = p.device if _counts_on_device(p.device) else "cpu"
    return torch.zeros((), dtype=torch.int64, device=where)


def _counts_on_device(device: torch.device) -> bool:
    return not gradients.host_reads(device) and device.type != "meta"


def has_a_past(row: Mapping[str, Any]) -> bool:
    """Whether the row of a diagonal method has been updated and its count does not say so.

    It is from before there were counts; where `step` is missing, torch's checkpoint functions put
    that of the new optimizer there.  Waits for the device.
    """
    if "preconditioner" not in row or "step" not in row:
        return False
    s = getattr(row["preconditioner"], "_local_tensor", row["preconditioner"])
    return int(row["step"]) == 0 and not s.is_meta and bool((s != 1).any())


def lay_out_counts(memory: GroupMemory, *, clock: bool) -> None:
    """Put the counts of a group into one tensor per device; state gets views.  Changes memory.

    `clock`: whether the host schedules refreshes by them. Where it counts itself, these are one.
    """
    if not memory.params:
        return
    devices = dict.fromkeys(p.device for p in memory.params)
    on_host = not any(map(_counts_on_device, devices))
    if clock and on_host and not any(CLOCK in row for row in memory.rows):
        memory.steps = torch.stack([row["step"] for row in memory.rows])
        for row, step in zip(memory.rows, memory.steps.unbind(), strict=True):
            row["step"] = step
        return
    steps = [row["step"] for row in memory.rows]
    for device in dict.fromkeys(step.device for step in steps):
        # As long as the group: positions in the group are positions here.
        here = [step if step.device == device else step.to(device) for step in steps]
        memory.counts[device] = torch.stack(here)
    for i, row in enumerate(memory.rows):
        row["step"] = memory.counts[row["step"].device][i]
    if clock:
        read_clocks(memory)


def read_clocks(memory: GroupMemory) -> None:
    """Set the clock from the state, where it is a separate number.  Changes memory and state.

    The host waits for the device, but only after a checkpoint is loaded or state is laid out.
    """
    if not memory.counts:
        return
    known = {device: counts.cpu() for device, counts in memory.counts.items()}
    clocks = [
        row.pop(CLOCK).cpu() if CLOCK in row else known[row["step"].device][i]
        for i, row in enumerate(memory.rows)
    ]
    memory.steps = torch.stack(clocks)


def count_(memory: GroupMemory, work: Work) -> None:
    """Count an update on the device, unless the step is skipped.  Changes memory.counts."""
    counts = memory.counts[memory.rows[work.where[0]]["step"].device]
    if isinstance(counts, FakeTensor):  # estimates memory
        return
    if work.ones is None:  # 1 for every parameter that has a gradient, else 0
        ones = [0] * len(counts)
        for i in work.where:
            ones[i] = 1
        work.ones = as_table(ones, counts.dtype, counts.device)
    if work.skip is None or work.skip.is_meta:  # a meta tensor is no number
        counts.add_(work.ones)
    else:
        counts.add_(work.ones * (work.skip == 0))


def with_clocks(
    memories: Iterable[GroupMemory], rows: Mapping[Tensor, dict[str, Any]]
) -> dict[Tensor, dict[str, Any]]:
    """Rows of state, by parameter, with the clock where it differs from the count; waits."""
    found = dict(rows)
    for memory in memories:
        known = {device: counts.cpu() for device, counts in memory.counts.items()}
        for i, (p, row) in enumerate(zip(memory.params, memory.rows, strict=True)):
            # A row that was replaced since is not the one in memory.
            if known and p in rows and rows[p].get("step") is row["step"]:
                clock = cast("Tensor", memory.steps)[i]
                if known[row["step"].device][i] != clock:
                    found[p] = {**rows[p], CLOCK: clock.clone()}
    return found
