"""Runs of the laboratory, interrupted on four ranks, go on on two; see test_laboratory.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rootfree_lab.config.files import config_from
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.config.settings import Config
from rootfree_lab.files.records import read_records
from rootfree_lab.files.weights import weights_path
from rootfree_lab.processes.stopping import Interrupted
from rootfree_lab.training.run import records_path, train

OPTIMIZERS = {
    "IFWhitening": {"name": "IFWhitening", "lr": 2e-3},
    "AdamW": {"name": "AdamW", "lr": 1e-3},
}
STEPS = 6
UNDISTURBED = "laboratory-undisturbed"


def tables(optimizer: str, parallel: str, **changed: Any) -> dict[str, Any]:
    """A config as it is written."""
    return {
        "data": {"name": "digits", "limit": 160},
        "model": {"name": "small_cnn"},
        "optimizer": OPTIMIZERS[optimizer],
        "train": {
            "steps": STEPS,
            "batch_size": 32,
            "device": "cpu",
            "eval_every": 3,
            "parallel": parallel,
            **changed,
        },
    }


def config(optimizer: str, parallel: str, **changed: Any) -> Config:
    return config_from(tables(optimizer, parallel, **changed))


class AfterFour:
    """One rank is asked to stop after the fourth step."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def received(self) -> int | None:
        self.asked += 1
        return 15 if self.asked == 4 and dist.get_rank() == 1 else None


def saved() -> dict[str, Any]:
    """With a checkpoint after every step, and the weights in the end."""
    output = {"checkpoint_minutes": 0, "weights": True}
    return {**tables("IFWhitening", "fsdp2"), "output": output}


def undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the run of test_kill.py, without a kill."""
    settings = config_from(saved())
    train(settings, out=folder)
    dist.barrier()
    return torch.load(weights_path(folder, settings))


def run(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    world = dist.get_world_size()
    if world == 2:
        found[UNDISTURBED] = undisturbed(folder / UNDISTURBED)
    for name in OPTIMIZERS:
        out = folder / f"laboratory-{name}"
        if world == 4:
            try:
                train(
                    config(name, "hsdp" if name == "AdamW" else "fsdp2"), out=out, stop=AfterFour()
                )
            except Interrupted as stopped:
                found[name] = stopped.exit_code, read_records(records_path(out))
        else:
            mode = "ddp" if name == "IFWhitening" else "fsdp2"
            train(config(name, mode), out=out, resume=True)
            dist.barrier()
            found[name] = list(read_records(records_path(out)))
    try:
        train(config("AdamW", "ddp", batch_size=33), out=folder)
    except ConfigError as error:
        found["uneven"] = str(error)
    return {"laboratory": found}
