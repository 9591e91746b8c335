"""The optimizers that can be timed, and the choice from them by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import rootfree
from rootfree_lab.bench import floors
from rootfree_lab.config.reading import ConfigError, unknown_name
from rootfree_lab.optimizers import available, construct

Parameters = list[nn.Parameter]

LR, B = 1e-4, 128  # small steps, so that the few that are taken do not overflow
REFERENCE = "torch AdamW fused"
GRAPH = ", graph"
#: the default on a CPU; eigendecompositions of large matrices would take minutes there
DEFAULT_ON_CPU = (
    "torch AdamW fused",
    "torch RMSprop foreach",
    "RFRMSprop",
    "RFAdamW",
    "IFShampoo T=2",
    "sirfshampoo fp32 T=2",
)


class NotApplicableError(Exception):
    """The contender cannot step on these parameters or on this machine; the message says why."""


@dataclass(frozen=True)
class Built:
    """A contender with its optimizers, companions included, and a function that steps them all."""

    parameters: Parameters
    optimizers: Sequence[Optimizer]
    step: Callable[[], Any]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext  # of forward and backward


@dataclass(frozen=True)
class Contender:
    """The optimizer of one row of the table."""

    name: str
    build: Callable[[Parameters], Built]
    family: str  # "torch", "rootfree" or "peer"
    period: int = 1  # T: one step of so many refreshes the preconditioner
    floor: floors.Count = floors.unknown
    on_model: Callable[[nn.Module], Built] | None = None  # for one that records the passes
    room: float = 16.0  # most bytes per parameter that it holds, the parameter itself included


def one(make: Callable[[Parameters], Optimizer]) -> Callable[[Parameters], Built]:
    """A contender that is a single optimizer."""

    def build(ps: Parameters) -> Built:
        optimizer = make(ps)
        return Built(ps, [optimizer], optimizer.step)

    return build


def _make(method: str, ps: Parameters, **options: Any) -> Optimizer:
    """An optimizer of the laboratory's registry, with the settings of the benchmark."""
    named = [(str(place), p) for place, p in enumerate(ps)]
    return construct(method, named, batch_size=B, lr=LR, **options)


def _row(
    name: str, family: str, method: str, *, period: int = 1, floor: floors.Count = floors.unknown,
    room: float = 16.0, **options: Any,
) -> Contender:  # fmt: skip
    build = one(partial(_make, method, **options))
    period = options.get("update_every", period)
    return Contender(name, build, family, period=period, floor=floor, room=room)


def _compiled_rmsprop(ps: Parameters) -> Built:
    optimizer = _make("RMSprop", ps, momentum=0.9)
    return Built(ps, [optimizer], torch.compile(optimizer.step))


def _muon(ps: Parameters) -> Built:
    if not available("Muon"):
        raise NotApplicableError(f"torch has Muon since 2.9, this is {torch.__version__}")
    matrices, rest = [p for p in ps if p.dim() == 2], [p for p in ps if p.dim() != 2]
    covered = sum(p.numel() for p in matrices) / sum(p.numel() for p in ps)
    if covered < 0.5:
        raise NotApplicableError(f"torch's Muon takes 2-D parameters only: {covered:.1%} of these")
    optimizers = [_make("Muon", matrices)]
    if rest:
        optimizers.append(_make("AdamW", rest, fused=True))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return Built(ps, optimizers, step)


def torch_contenders() -> list[Contender]:
    """The reference and its like."""
    plain = partial(_row, family="torch", floor=floors.elementwise)
    compiled = Contender(
        "torch RMSprop compiled", _compiled_rmsprop, "torch", floor=floors.elementwise
    )
    return [
        plain(REFERENCE, method="AdamW", fused=True),
        plain("torch AdamW foreach", method="AdamW", foreach=True),
        plain("torch SGD momentum", method="SGD", momentum=0.9, foreach=True),
        plain("torch RMSprop foreach", method="RMSprop", momentum=0.9, foreach=True),
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


def rootfree_contenders() -> list[Contender]:
    """Optimizers of this library at their defaults, except for what the name says."""
    ours = partial(_row, family="rootfree")
    diagonal = partial(ours, floor=floors.elementwise)
    shampoo = partial(ours, method="IFShampoo", floor=floors.inverse_free, room=24.0)
    whitening = partial(ours, method="IFWhitening", room=24.0)
    half: Any = {"factor_dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
    decay: Any = {"update_every": 2, "weight_decay": 0.1}
    kfac = Contender(
        "IFShampoo KFAC T=2", _without_model, "rootfree", period=2, on_model=_kfac, room=40.0
    )
    return [
        diagonal("RFRMSprop", method="RFRMSprop"),
        diagonal("RFAdagrad", method="RFAdagrad"),
        diagonal("RFAdamW", method="RFAdamW"),
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
        ours("RFShampoo T=2", method="RFShampoo", room=40.0, update_every=2),
    ]


def _soap(ps: Parameters) -> Optimizer:
    names = ("pytorch_optimizer.SOAP", "heavyball.SOAP")
    return _make(next(filter(available, names), names[0]), ps, update_every=10)


def _distributed_shampoo(ps: Parameters) -> Optimizer:
    try:
        module: Any = importlib.import_module("distributed_shampoo")
    except ModuleNotFoundError as error:
        raise NotApplicableError(
            f"needs {error.name}: it is not on PyPI, but in github.com/facebookresearch/optimizers"
        ) from error
    return module.DistributedShampoo(  # type: ignore[no-any-return]
        ps, lr=LR, max_preconditioner_dim=8192, precondition_frequency=10
    )


def peers() -> list[Contender]:
    """Optimizers of other packages, imported when they are built; a row says if one is missing."""
    scalable: Any = {"start_preconditioning_step": 1, "preconditioning_compute_steps": 10}
    # Dense factors of biases would cost more than those of the matrices.
    structures = {1: "diagonal", **dict.fromkeys((2, 3, 4, 5), "dense")}

    def published(T: int, dtype: torch.dtype, room: float) -> Contender:
        bits = "fp32" if dtype == torch.float32 else "bf16"
        return _row(
            f"sirfshampoo {bits} T={T}", "peer", "sirfshampoo", room=room, update_every=T,
            floor=partial(floors.published_inverse_free, dtype=dtype),
            structures=structures, factor_dtype=dtype,
        )  # fmt: skip

    return [
        _row("Shampoo T=2", "peer", "Shampoo", update_every=2, room=60.0),
        published(2, torch.float32, 68.0),
        published(2, torch.bfloat16, 40.0),
        published(10, torch.bfloat16, 40.0),
        Contender("SOAP T=10", one(_soap), "peer", period=10, room=52.0),
        _row(
            "Scalable Shampoo T=10", "peer", "pytorch_optimizer.ScalableShampoo", period=10,
            room=60.0, block_size=1024, **scalable,
        ),
        Contender(
            "Distributed Shampoo T=10", one(_distributed_shampoo), "peer", period=10, room=52.0
        ),
    ]  # fmt: skip


def graphed(contender: Contender) -> Contender:
    """The same optimizer with steps that are replayed from a CUDA graph."""

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

    # Temporaries stay reserved in the pool of the graph.
    return replace(contender, name=contender.name + GRAPH, build=build, room=contender.room + 16)


def contenders(*, graph: bool = False) -> dict[str, Contender]:
    """All contenders by name, including peers that are not installed."""
    table: list[Contender] = [*torch_contenders(), *rootfree_contenders(), *peers()]
    if graph:
        table += [graphed(c) for c in table if c.family == "rootfree" and c.on_model is None]
    return {contender.name: contender for contender in table}


def chosen(
    wanted: Sequence[str], unwanted: Sequence[str], *, default: Iterable[str], graph: bool
) -> list[Contender]:
    """The contenders whose names match a pattern, in the order of the patterns.

    Patterns may contain * and ?. With `graph`, the graphed versions of the matches are added.
    """
    table = contenders(graph=graph)
    names = list(default) if not wanted else _matching(wanted, table, "--optimizer")
    left_out = set(_matching(unwanted, table, "--without"))
    if graph:
        names += [n + GRAPH for n in names if n + GRAPH in table]
    names = [n for n in dict.fromkeys(names) if n not in left_out]
    if not names:
        raise ConfigError("--without leaves no optimizer to measure")
    return [table[name] for name in names]


def _matching(patterns: Sequence[str], table: Iterable[str], option: str) -> list[str]:
    names: list[str] = []
    for pattern in patterns:
        found = [name for name in table if fnmatchcase(name, pattern)]
        if not found:
            raise unknown_name(f"{option}: the optimizer", pattern, table)
        names += found
    return names
