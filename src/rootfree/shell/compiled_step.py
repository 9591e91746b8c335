"""A step of a matrix method as one operation of a compiled graph.

The host decides what a step of a matrix method does: whether it refreshes factors, which stacks and
kernels it uses. A graph that torch.compile traces through the step would fix these decisions. So
the whole step is one opaque operation for the compiler. It runs as it does without a compiler, and
`torch.compile(optimizer.step, fullgraph=True)` gives one graph.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rootfree.shell.block_optimizer import BlockOptimizer

#: Optimizers whose steps may be in a graph, by handle.
_OPTIMIZERS: WeakValueDictionary[int, BlockOptimizer] = WeakValueDictionary()
_handles = count(2)  # the compiler specialises on 0 and 1, and not on other numbers

# CUDA graphs would replay the decisions of one step; the tag keeps the operation out of them.
# In versions of torch without the tag, steps stay out of compiled graphs.
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)


def new_handle(optimizer: BlockOptimizer) -> int:
    """The number by which a graph finds the optimizer."""
    handle = next(_handles)
    _OPTIMIZERS[handle] = optimizer
    return handle


def fits_in_graph(optimizer: BlockOptimizer) -> bool:
    """Whether the step can be an operation: not with sharded or other subclassed parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return _UNSAFE is not None and all(type(p) in (Tensor, nn.Parameter) for p in params)


def step_in_graph(optimizer: BlockOptimizer) -> None:
    """Put the step into the graph that is being traced."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    where = [i for i, p in enumerate(params) if p.grad is not None]
    ps, gs = [params[i] for i in where], [params[i].grad for i in where]
    torch.ops.rootfree.step(optimizer._handle, where, ps, gs)


def _step(handle: int, where: list[int], ps: list[Tensor], gs: list[Tensor]) -> None:
    """Step with the gradients gs of the parameters at `where`.  Changes ps, and the optimizer.

    The graph may pass copies of the parameters: of those it changed itself, or of all.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a compiled step of a matrix method cannot be captured in a CUDA graph: the host "
            "decides what each step does. Use rootfree.GraphedStep(optimizer)"
        )
    optimizer = _OPTIMIZERS[handle]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [p.grad for p in params]
    mine = [params[i] for i in where]
    copies = [(p, given) for p, given in zip(mine, ps, strict=True) if not _same(p, given)]
    with torch.no_grad():
        for p, given in copies:
            p.copy_(given)
        try:
            for p, g in zip(mine, gs, strict=True):
                p.grad = g
            optimizer._plain_step()
        finally:
            for p, g in zip(params, kept, strict=True):
                p.grad = g
        for p, given in copies:
            given.copy_(p)


def _same(p: Tensor, given: Tensor) -> bool:
    return p.data_ptr() == given.data_ptr() and p.stride() == given.stride()


_library = torch.library.Library("rootfree", "DEF")
_library.define(
    "step(SymInt handle, SymInt[] where, Tensor(a!)[] ps, Tensor[] gs) -> ()",
    tags=() if _UNSAFE is None else (_UNSAFE,),
)
_library.impl("step", _step, "CompositeExplicitAutograd")
_library.impl("step", lambda *given: None, "Meta")  # for the compiler, which asks for results
