"""Checkpoints that travel from world to world; see test_checkpoints.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import rootfree
from distributed.methods import with_companion
from distributed.models import MODES, data_ranks, network, train, weights, whole

#: the mode of each turn, and whether its optimizer state is saved flat
TURNS = (("fsdp2", False), ("ddp sharded", True), ("alone", True), ("hsdp", False))
STEPS = 3  # in each turn


def made(mode: str) -> tuple[Any, Any]:
    model = (MODES[mode] if mode != "alone" else whole)(network())
    placement = {"placement": rootfree.Sharded()} if mode == "ddp sharded" else {}
    return model, with_companion(model, **placement)


def options(flat: bool) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=flat)


def state_of(model: Any, optimizer: Any, flat: bool) -> dict[str, Any]:
    state = get_optimizer_state_dict(model, optimizer, options=options(flat))
    return {"optimizer": state, "model": dcp.state_dict.get_model_state_dict(model)}


def restore(model: Any, optimizer: Any, folder: Path, flat: bool) -> None:
    state = state_of(model, optimizer, flat)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options(flat))
    dcp.state_dict.set_model_state_dict(model, state["model"])


def run(turn: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mode, flat = TURNS[turn]
    model, optimizer = made(mode)
    if turn > 0:
        restore(model, optimizer, folder / f"checkpoint-{turn - 1}", flat)
        found["loaded"] = rootfree.full_state_dict(optimizer), weights(model)
    part = data_ranks(mode) if mode != "alone" else (0, 1)
    train(model, optimizer, range(STEPS * turn, STEPS * (turn + 1)), part=part)
    found["saved"] = rootfree.full_state_dict(optimizer), weights(model)
    if turn < len(TURNS) - 1:
        where = folder / f"checkpoint-{turn}"
        flat = TURNS[turn + 1][1]  # read as it is written
        state = state_of(model, optimizer, flat)
        if turn == 1:
            group = dist.new_group(backend="gloo")  # DDP uses the default one meanwhile
            saving = dcp.async_save(state, checkpoint_id=where, process_group=group)
            train(model, optimizer, range(90, 93), part=part)
            saving.result()
        else:
            dcp.save(state, checkpoint_id=where)
    if turn == 0:
        found["between modes"] = between_modes(optimizer)
    dist.barrier()
    return {"checkpoints": found}


def between_modes(optimizer: Any) -> dict[str, Any]:
    """A state in one piece, and DTensors of another mesh, into optimizers of every mode."""
    found = {}
    saved = rootfree.full_state_dict(optimizer)
    for mode in ("tp", "fsdp2+tp", "ddp sharded", "ddp"):
        _, other = made(mode)
        other.load_state_dict(saved)
        found[mode] = rootfree.full_state_dict(other)
    for mode in ("fsdp2", "hsdp"):  # DTensors of the same mesh, and of another
        _, other = made(mode)
        other.load_state_dict(optimizer.state_dict())
        found[f"{mode} from DTensors"] = rootfree.full_state_dict(other)
    return found
