"""How the optimizers that can be timed are made: torch's and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import rootfree
from rootfree_lab.bench import floors

Parameters = list[nn.Parameter]

LR, B = 1e-4, 128  # small steps: nothing leaves its range in the few that are taken
REFERENCE = "torch AdamW fused"
GRAPH = ", graph"


class NotApplicableError(Exception):
    """The contender cannot step on these parameters, or not here; the message says why."""


@dataclass(frozen=True)
class Built:
    """A contender at work: its optimizers (a companion is one of them) and one step of all."""

    parameters: Parameters
    optimizers: Sequence[Optimizer]
    step: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # of forward and backward


@dataclass(frozen=True)
class Contender:
    """How one row of the table comes about."""

    name: str
    build: Callable[[Parameters], Built]
    family: str  # "torch", "rootfree" or "peer"
    period: int = 1  # T: a full cycle of steps, one of which refreshes the preconditioner
    floor: floors.Count = floors.unknown
    on_model: Callable[[nn.Module], Built] | None = None  # where it has to see forward and backward
    room: float = 16.0  # bytes a parameter that it holds at most, the parameter itself included


def one(make: Callable[[Parameters], Optimizer]) -> Callable[[Parameters], Built]:
    """A contender that is a single optimizer."""

    def build(ps: Parameters) -> Built:
        optimizer = make(ps)
        return Built(ps, [optimizer], optimizer.step)

    return build


def several(optimizers: Sequence[Optimizer], ps: Parameters) -> Built:
    """A contender that is an optimizer and its companions."""

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return Built(ps, optimizers, step)


def _compiled_rmsprop(ps: Parameters) -> Built:
    optimizer = torch.optim.RMSprop(ps, lr=LR, momentum=0.9)
    return Built(ps, [optimizer], torch.compile(optimizer.step))


def _muon(ps: Parameters) -> Built:
    if not hasattr(torch.optim, "Muon"):
        raise NotApplicableError(f"torch has Muon since 2.9, this is {torch.__version__}")
    matrices, rest = [p for p in ps if p.dim() == 2], [p for p in ps if p.dim() != 2]
    covered = sum(p.numel() for p in matrices) / sum(p.numel() for p in ps)
    if covered < 0.5:
        raise NotApplicableError(f"torch's Muon takes 2-D parameters only: {covered:.1%} of these")
    optimizers: list[Optimizer] = [torch.optim.Muon(matrices, lr=LR)]
    if rest:
        optimizers.append(torch.optim.AdamW(rest, lr=LR, fused=True))
    return several(optimizers, ps)


def torch_contenders() -> list[Contender]:
    """The reference and its like."""

    def plain(name: str, make: Any, **options: Any) -> Contender:
        build = one(lambda ps: make(ps, lr=LR, **options))
        return Contender(name, build, "torch", floor=floors.elementwise)

    optim = torch.optim
    compiled = Contender(
        "torch RMSprop compiled", _compiled_rmsprop, "torch", floor=floors.elementwise
    )
    return [
        plain(REFERENCE, optim.AdamW, fused=True),
        plain("torch AdamW foreach", optim.AdamW, foreach=True),
        plain("torch SGD momentum", optim.SGD, momentum=0.9, foreach=True),
        plain("torch RMSprop foreach", optim.RMSprop, momentum=0.9, foreach=True),
        compiled,
        Contender("torch Muon", _muon, "torch", floor=floors.muon),
    ]


def _without_model(ps: Parameters) -> Built:
    raise NotApplicableError("it records curvature during forward and backward: see --iteration")


def _kfac(model: nn.Module) -> Built:
    ps = [p for p in model.parameters() if p.requires_grad]
    recorder = rootfree.KFACRecorder(model)
    optimizer = rootfree.IFShampoo(ps, lr=LR, batch_size=B, update_every=2, curvature=recorder)
    around = lambda: recorder.when(optimizer.refreshes_next)  # noqa: E731
    return Built(ps, [optimizer], optimizer.step, around)


def _ours(
    name: str, method: Any, *, floor: floors.Count = floors.unknown, room: float = 16.0,
    **options: Any,
) -> Contender:  # fmt: skip
    own = {"batch_size": B, **options} if "batch_size" in method.options else options
    build = one(lambda ps: method(ps, lr=LR, **own))
    period = options.get("update_every", 1)
    return Contender(name, build, "rootfree", period=period, floor=floor, room=room)


def rootfree_contenders() -> list[Contender]:
    """Ours, at their defaults but for what the name says."""
    diagonal = partial(_ours, floor=floors.elementwise)
    shampoo = partial(_ours, method=rootfree.IFShampoo, floor=floors.inverse_free, room=24.0)
    whitening = partial(_ours, method=rootfree.IFWhitening, room=24.0)
    half: Any = {"factor_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
    decay: Any = {"update_every": 2, "weight_decay": 0.1}
    kfac = Contender(
        "IFShampoo KFAC T=2", _without_model, "rootfree", period=2, on_model=_kfac, room=40.0
    )
    return [
        diagonal("RFRMSprop", rootfree.RFRMSprop),
        diagonal("RFAdagrad", rootfree.RFAdagrad),
        diagonal("RFAdamW", rootfree.RFAdamW),
        shampoo("IFShampoo T=1", update_every=1),
        shampoo("IFShampoo T=2", update_every=2),
        shampoo("IFShampoo T=10", update_every=10),
        shampoo("IFShampoo low memory T=2", update_every=2, **half),
        shampoo("IFShampoo update RMS T=2", update_rms=0.2, **decay),
        shampoo("IFShampoo bf16 state T=2", update_every=2, state_dtype=torch.bfloat16),
        shampoo("IFShampoo Nesterov T=2", nesterov=True, decoupled_weight_decay=True, **decay),
        kfac,
        whitening("IFWhitening T=2", update_every=2),
        whitening("IFWhitening T=10", update_every=10),
        whitening("IFWhitening low memory T=2", update_every=2, **half),
        _ours("RFShampoo T=2", rootfree.RFShampoo, room=40.0, update_every=2),
    ]


def graphed(contender: Contender) -> Contender:
    """The same optimizer, its steps replayed from a CUDA graph."""

    def build(ps: Parameters) -> Built:
        if ps[0].device.type != "cuda":
            raise NotApplicableError("CUDA graphs need a GPU")
        built = contender.build(ps)
        (optimizer,) = built.optimizers
        assert isinstance(optimizer, rootfree.RootFreeOptimizer)
        try:
            return replace(built, step=rootfree.GraphedStep(optimizer).step)
        except ValueError as error:
            raise NotApplicableError(str(error)) from error

    # Its temporaries stay reserved in the graph's own pool.
    return replace(contender, name=contender.name + GRAPH, build=build, room=contender.room + 16)
