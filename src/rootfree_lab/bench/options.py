"""The options of `rootfree bench`, by what it is to do; a help that shows them needs no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from rootfree_lab.config.reading import ConfigError

_tried = partial(typer.Option, rich_help_panel="With --first-try")
_planned = partial(typer.Option, rich_help_panel="With --distributed-model")

Command = TypeVar("Command", bound=Callable[..., Any])
Several = list[str] | None
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda if available.")]
Json = Annotated[
    Path | None,
    typer.Option(
        dir_okay=False,
        help="File to write all figures to; with --first-try one line a run, and a run that is "
        "in it is not repeated.",
    ),
]
Page = Annotated[Path | None, _tried(help="Put table and verdict between the marks of this page.")]


@dataclass(frozen=True)
class Timing:
    """Steps, or training iterations, on the clock."""

    shapes: Annotated[
        str | None,
        typer.Option(
            help="Parameters to step on: vit_b, gpt1b, resnet34, vit_b_third, tiny; default: "
            "vit_b, on a CPU vit_b_third."
        ),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="Step on the parameters of a timm model or a laboratory model."),
    ] = None
    iteration: Annotated[
        str | None, typer.Option(help="Time whole training iterations of a model instead.")
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Batch size of --iteration.")] = 128
    dtype: Annotated[str, typer.Option(help="dtype of parameters and gradients: fp32 or bf16.")] = (
        "fp32"
    )
    optimizer: Annotated[
        Several,
        typer.Option(help="Optimizer to time, or a pattern such as 'IFShampoo*'; repeatable."),
    ] = None
    without: Annotated[
        Several, typer.Option(help="Optimizer or pattern to leave out; repeatable.")
    ] = None
    reference: Annotated[
        str | None, typer.Option(help="Optimizer that ratios compare with; default: the first.")
    ] = None
    graph: Annotated[
        bool, typer.Option("--graph", help="Also time our steps replayed from a CUDA graph.")
    ] = False
    turns: Annotated[
        int | None, typer.Option(min=1, help="Turns of each; default: 20 on a GPU, 5 on a CPU.")
    ] = None
    seconds: Annotated[
        float,
        typer.Option(
            help="Stop timing an optimizer after this many seconds, but not before two turns."
        ),
    ] = 20.0
    device: Device = None
    json: Json = None
    chart: Annotated[
        Path | None, typer.Option(dir_okay=False, help="File for a bar chart: .png, .svg, .pdf.")
    ] = None


@dataclass(frozen=True)
class FirstTry:
    """Small tasks, each trained with every optimizer."""

    first_try: Annotated[
        bool,
        _tried(
            "--first-try",
            help="Train a dozen small real tasks with every optimizer at its defaults instead.",
        ),
    ] = False
    held_out: Annotated[
        bool, _tried("--held-out", help="Take other tasks, written after the defaults were chosen.")
    ] = False
    tasks: Annotated[str, _tried(help="Tasks, with commas between; default: all.")] = ""
    optimizers: Annotated[str, _tried(help="Optimizers, with commas between; default: all.")] = ""
    assignments: Annotated[
        Several,
        _tried(
            "--set",
            help="Override a default: IFShampoo.lr=3e-3; values with commas between are all tried; "
            "may be given repeatedly.",
        ),
    ] = None
    seeds: Annotated[int, _tried(min=1, help="Runs of each, from seed 0 on.")] = 3
    scale: Annotated[
        str, _tried(help="small (seconds a run on a CPU) or full (a minute on a GPU).")
    ] = "small"
    steps: Annotated[int | None, _tried(min=1, help="Instead of the task's own.")] = None
    constant: Annotated[
        bool, _tried("--constant", help="1,500 steps at a constant learning rate: late spikes.")
    ] = False
    sensitivity: Annotated[
        bool,
        _tried("--sensitivity", help="Also change one setting at a time, and show what that does."),
    ] = False
    data: Annotated[
        Path | None, _tried(help="Folder with cifar10.npz, sotu.txt, cora.npz, letter.dat ...")
    ] = None
    jobs: Annotated[int, _tried(min=1, help="Runs side by side, as processes.")] = 1
    tuned: Annotated[
        bool,
        _tried(
            "--tuned", help="Show the best setting of each optimizer in --json, and train nothing."
        ),
    ] = False
    table_only: Annotated[
        bool, _tried("--table-only", help="Show what --json has, and train nothing.")
    ] = False
    device: Device = None
    json: Json = None
    page: Page = None
    pack: Annotated[
        Path | None, _tried(help="Only write the folder for --data, from the cache (and --data).")
    ] = None


@dataclass(frozen=True)
class Distributed:
    """What a step of large models costs many ranks."""

    distributed_model: Annotated[
        bool,
        _planned(
            "--distributed-model",
            help="Count what a step of models of 1 to 70 billion parameters costs each of 8 to "
            "1,024 ranks instead; nothing runs. --json and --page belong to it too.",
        ),
    ] = False
    node_link: Annotated[
        float, _planned(help="GB/s that a rank sends to the 7 others of its node.")
    ] = 300.0
    link: Annotated[float, _planned(help="GB/s that a rank sends to other nodes.")] = 40.0
    matmul: Annotated[float, _planned(help="TFLOP/s of a rank's matrix products.")] = 400.0
    json: Json = None
    page: Page = None


Mode = Timing | FirstTry | Distributed
#: By the option that asks for it; the first needs no asking.
MODES: dict[str, type[Mode]] = {
    "": Timing, "--first-try": FirstTry, "--distributed-model": Distributed,
}  # fmt: skip


def takes_options(command: Command) -> Command:
    """Let a command have the options of all modes, each once."""
    found: dict[str, inspect.Parameter] = {}
    for mode in MODES.values():
        hints = get_type_hints(mode, include_extras=True)
        for each in fields(mode):
            found[each.name] = inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default,
                annotation=hints[each.name],
            )  # fmt: skip
    vars(command)["__signature__"] = inspect.Signature(list(found.values()))
    return command


def asked_for(given: Mapping[str, Any]) -> Mode:
    """The one mode that was asked for; an option of another is an error."""
    modes = {
        flag: mode(**{each.name: given[each.name] for each in fields(mode)})
        for flag, mode in MODES.items()
    }
    asked = [flag for flag in modes if flag and given[flag.strip("-").replace("-", "_")]]
    if len(asked) > 1:
        raise ConfigError(f"{asked[1]} has no place beside {asked[0]}")
    chosen = asked[0] if asked else ""
    own = {each.name for each in fields(modes[chosen])}
    for flag, idle in modes.items():
        for each in fields(idle):
            value = getattr(idle, each.name)
            changed = bool(value) if isinstance(value, list) else value != each.default
            if changed and each.name not in own:
                option = "--" + {"assignments": "set"}.get(each.name, each.name).replace("_", "-")
                why = f"needs {flag}" if flag else f"has no place beside {chosen}"
                raise ConfigError(f"{option} {why}")
    return modes[chosen]
