"""The loops of the page, the Trainer and an example, on two ranks and one; see test_ranks.py."""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import rootfree
from integrations.page import LOOPS, scripts
from rootfree_lab.torchvision_shim import make_importable

EXAMPLE = Path(__file__).parents[2] / "examples" / "many_devices.py"
HAS_TRAINER = bool(find_spec("transformers") and find_spec("accelerate"))
if HAS_TRAINER:  # before there are ranks: once for all of them
    make_importable()
    from transformers import Trainer


def run(turn: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for heading in LOOPS:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        with patch.object(dist, "init_process_group", lambda: None):  # it is there already
            exec(compile(scripts()[heading], heading, "exec"), namespace)
        found[heading] = [p.full_tensor().detach() for p in namespace["model"].parameters()]
    found["example"] = [printed_by_the_example(*flags) for flags in ((), ("--fsdp",))]
    if HAS_TRAINER:
        found["trainer"] = batch_sizes_of_the_trainer(folder / str(turn))
    return found


def printed_by_the_example(*flags: str) -> str:
    printed = io.StringIO()
    with (
        patch.object(dist, "init_process_group", lambda: None),
        patch.object(dist, "destroy_process_group", lambda: None),
        patch.object(sys, "argv", ["many_devices", "--steps", "30", *flags]),
        patch.object(sys, "path", [str(EXAMPLE.parent), *sys.path]),
        redirect_stdout(printed),
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def batch_sizes_of_the_trainer(folder: Path) -> list[tuple[int, int]]:
    """B of each step, and what the Trainer said that it divides by."""
    from integrations.language import arguments, llama, texts
    from rootfree.integrations.huggingface import BatchSizeCallback

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="localhost")
    told: list[int] = []

    class Telling(Trainer):
        def _get_num_items_in_batch(self, *args: Any) -> Any:
            number = super()._get_num_items_in_batch(*args)
            told.append(int(number))
            return number

    model = llama()
    optimizer = rootfree.RFRMSprop(model.parameters(), lr=1e-3)
    used: list[int] = []
    optimizer.register_step_post_hook(lambda o, *_: used.append(o.batch_size))
    Telling(
        model,
        arguments(folder, ddp_backend="gloo"),
        train_dataset=texts(14),
        optimizers=(optimizer, None),
        callbacks=[BatchSizeCallback()],
    ).train()
    return list(zip(used, told, strict=True))
