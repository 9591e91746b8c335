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

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import rootfree
from integrations.page import LOOPS, scripts
from rootfree_lab.torchvision_shim import make_importable

EXAMPLE = Path(__file__).parents[2] / "examples" / "many_devices.py"
HAS_TRAINER = bool(find_spec("transformers") and find_spec("accelerate"))
if HAS_TRAINER:  # before there are ranks: once for all of them
    make_importable()
    from transformers import Trainer
HAS_LIGHTNING = find_spec("lightning") is not None
if HAS_LIGHTNING:
    import lightning


def run(turn: int, folder: Path) -> dict[str, Any]:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", TORCHELASTIC_RUN_ID="test")
    found: dict[str, Any] = {}
    for heading in LOOPS:
        namespace: dict[str, Any] = {"__name__": "__main__"}
        with patch.object(dist, "init_process_group", lambda: None):  # it is there already
            exec(compile(scripts()[heading], heading, "exec"), namespace)
        found[heading] = [p.full_tensor().detach() for p in namespace["model"].parameters()]
    found["example"] = [printed_by_the_example(*flags) for flags in ((), ("--fsdp",))]
    found["swapped"], found["direct"] = sharded(swapped=True), sharded(swapped=False)
    if HAS_LIGHTNING:
        found["lightning"] = batch_sizes_of_lightning(folder / str(turn))
    if HAS_TRAINER:
        found["trainer"] = batch_sizes_of_the_trainer(folder / str(turn))
    return found


def sharded(*, swapped: bool) -> tuple[list[torch.Tensor], int, dict[str, Any]]:
    """Trained with FSDP2: parameters, how many have state, and the checkpoint in one piece.

    `swapped`: the optimizer is made first, and gets the shards as Accelerator.prepare gives them
    (which has FSDP2 on accelerators alone).
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    names = {name: p.data_ptr() for name, p in model.named_parameters()}

    def make() -> rootfree.IFShampoo:
        return rootfree.IFShampoo(rootfree.parameter_groups(model), lr=1e-2, batch_size=8)

    early = make() if swapped else None
    for group in early.param_groups if early else []:
        for i, p in enumerate(group["params"]):
            group["params"][i] = torch.empty(1)
            group["params"][i].data_ptr = p.data_ptr()
    fully_shard(model)
    shards = {names[name]: p for name, p in model.named_parameters()}
    for group in early.param_groups if early else []:  # fsdp2_switch_optimizer_parameters
        group["params"] = [shards[p.data_ptr] for p in group["params"]]
    optimizer = early or make()
    optimizer.load_state_dict(optimizer.state_dict())  # as the wrapper of the optimizer does
    for step in range(3):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    params = [p.to_local().detach() for p in model.parameters()]
    return params, len(optimizer.state), rootfree.full_state_dict(optimizer)["state"]


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


def batch_sizes_of_lightning(folder: Path) -> list[int]:
    """B of each step; rank 0 has batches of 3, rank 1 of 5."""
    from rootfree.integrations.lightning import BatchSizeCallback

    used: list[int] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = rootfree.RFRMSprop(self.parameters())
            optimizer.register_step_post_hook(lambda o, *_: used.append(o.batch_size))
            return optimizer

    length = 3 + 2 * dist.get_rank()
    data = torch.utils.data.TensorDataset(torch.randn(4 * length, 4), torch.arange(4 * length) % 3)
    quiet = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp" if dist.get_world_size() > 1 else "auto",
        max_epochs=1,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        default_root_dir=folder,
        callbacks=[BatchSizeCallback()],
        **dict.fromkeys(quiet, False),
    ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=length))
    return used
