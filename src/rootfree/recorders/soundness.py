"""Whether the hooks saw everything: checked once for each parameter and module.

Hooks see what goes through a module. They do not see that a weight is also used elsewhere, that it
is made by a hook, or that examples are not on the first axis. Gradients tell each of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rootfree.structures.base import wide_dtype

# Products in half precision are off by some thousandths.
_TOLERANCE = 0.02
# A bias before a batch norm, or of the keys of attention, has a gradient of zero: what is left of
# the sum is rounding.
_CANCELLED = 1e-3
NOT_WHOLE = (
    "what went through its modules is not its whole gradient: it is used elsewhere too (tied, or "
    "by a function), made by a hook (weight_norm, spectral_norm), or its module mixes examples"
)
NOT_FIRST = "its examples are not on the first axis"
UNCLEAR = (
    "two of its axes are as long as the batch, and with sharded parameters it cannot be found out "
    "which of them counts the examples; another batch size tells them apart"
)
# The part of a gradient that must be where the example is.
_MOST = 0.9


class WholeGradients:
    """The gradients of parameters in a context, to compare with what was recorded."""

    def __init__(self) -> None:
        self._known: set[Tensor] = set()  # parameters that were checked
        self._totals: dict[Tensor, dict[int, Tensor]] = {}  # by parameter and backward pass

    def begin(self) -> None:
        """A new context: forget the gradients of an earlier one."""
        self._totals = {}

    def install(
        self, params: Mapping[Tensor, Tensor], scale_of: Callable[[Tensor], Any]
    ) -> list[Any]:
        """Hooks that keep the gradients of parameters that were not checked yet.

        `params`: each with the tensor that autograd differentiates by.
        """

        def keep(p: Tensor, grad: Tensor) -> None:
            wide = grad.detach().to(wide_dtype(grad.dtype)) / scale_of(grad)
            self._totals.setdefault(p, {})[this_backward()] = wide

        waiting = [p for p in params if p.requires_grad and p not in self._known]
        return [params[p].register_hook(partial(keep, p)) for p in waiting]

    def waits_for(self, p: Tensor) -> bool:
        """Whether a parameter was not checked yet."""
        return p not in self._known

    def contradicts(
        self,
        p: Tensor,
        passes: Iterable[int],
        recorded: Callable[[int], Tensor],
        size: Tensor | float = 0.0,
    ) -> bool:
        """Whether the recorded gradient of `p` is not its whole one; waits for the device once.

        `recorded`: the recorded gradient of each of the backward passes. `size`: the norm of the
        terms that it is a sum of.
        """
        totals = self._totals.pop(p, {})
        passes = [number for number in passes if number in totals]
        total = sum((totals[number] for number in passes), torch.zeros((), device="cpu"))
        if not 0 < float(total.norm()) < math.inf:
            return False  # nothing to compare with: another time
        self._known.add(p)
        found = torch.stack([recorded(number) for number in passes]).sum(0).reshape(total.shape)
        most = _TOLERANCE * total.norm() + _CANCELLED * size
        return not bool((found - total).norm() <= most)


def this_backward() -> int:
    """The number of the backward pass that is under way."""
    return torch._C._current_graph_task_id()


def which_have_examples_first(
    output: Any, n: int | None, edges: Sequence[Any]
) -> list[bool | None]:
    """Whether the tensor at each edge of the graph has its examples on the first axis.

    If so, a function of the first example's outputs has its gradient in the first row. False also
    where the outputs are not one tensor with a row for each example, so that this cannot be tested.
    None where the gradient is not finite: test another time.
    """
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != n:
        return [False] * len(edges)
    first = output[0].flatten()
    weights = torch.arange(1, first.numel() + 1, device=output.device, dtype=first.dtype).cos()
    value = (first * weights).sum()
    if not value.requires_grad:
        return [False] * len(edges)
    gradients = torch.autograd.grad(value, edges, retain_graph=True, allow_unused=True)
    return [False if g is None else _is_in_the_first_row(g) for g in gradients]


def _is_in_the_first_row(g: Tensor) -> bool | None:
    energy = g.detach().float().square()
    if not bool(energy.isfinite().all()):
        return None
    return bool(energy.any()) and bool(energy[0].sum() >= _MOST * energy.sum())
