"""Which ranks have the parameters of a new group too; steps that begin with a question to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._compile import _disable_dynamo

from rootfree.placement.homes import description
from rootfree.shell.said import asked

if TYPE_CHECKING:
    from rootfree.shell.optimizer import RootFreeOptimizer


def settle(optimizer: RootFreeOptimizer, group: dict[str, Any]) -> None:
    """Find out which ranks have a group's parameters too, and which blocks of them are whose.

    Called before there is any state.  Changes the optimizer.
    """
    agreement = optimizer._agreement
    params = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
    params = [p for p in params if not agreement.knows(p)]
    if params:
        cuts = optimizer._cuts(params, group)
        said = {**description(params, cuts or [[]] * len(params)), **asked(optimizer)}
        ranks = agreement.join(params, group, said, by_blocks=cuts is not None)
        if ranks is not None and cuts is not None:
            optimizer._place(params, cuts, ranks)
    if agreement.is_shared:
        optimizer._watch.over_ranks = agreement.any_


@_disable_dynamo
def uncompiled(step: Callable[..., Any], closure: Any) -> Any:
    """A step before which ranks agree: torch.compile leaves it as it is."""
    return step(closure)
