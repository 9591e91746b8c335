"""Ranks that see different batches, or are told different things; see test_agreement.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh

import rootfree
from distributed import found_alone, under_ddp
from distributed.by_hand import by_hand
from distributed.found_alone import stepped_alone
from distributed.methods import if_shampoo, rms_prop
from distributed.models import MODES, data_ranks, network, train

#: rows that each rank sees; one has no data
UNEQUAL = (1, 3, 0, 4)


def run(folder: Path) -> dict[str, Any]:
    rank = dist.get_rank()
    found: dict[str, Any] = {"batch sizes": batch_sizes(rank)}
    cases = {**CASES, "missing shard": partial(missing_shard, folder / "missing shard")}
    told = {**found_alone.CASES, **under_ddp.CASES}
    cases |= {name: case for name, (case, _) in told.items()}
    found["no false alarms"] = found_alone.no_false_alarms(rank)
    found["undisturbed"] = under_ddp.undisturbed(rank)
    found["counted later"] = under_ddp.counted_later(rank)
    found["errors"] = {}
    for name, case in cases.items():
        found["errors"][name] = error_of(case, rank)
        dist.barrier()  # a rank that has its error at once is not to meet the others in the next
    # From here on the ranks are at odds.
    found["added later"] = under_ddp.added_later(rank)
    # The last thing that happens: nothing can follow.
    optimizer, by_elements = sharded(), rms_prop(by_hand("sharded"))
    stepped_alone(optimizer)
    found_alone.stepped(by_elements)
    if rank != 1:
        found["errors"]["destroyed on one"] = error_of(lambda _: optimizer.step(), rank)
    dist.destroy_process_group()
    if rank == 1:
        found["errors"]["destroyed on one"] = error_of(lambda _: optimizer.step(), rank)
    found["errors"]["a destroyed process group"] = error_of(lambda _: optimizer.step(), rank)
    found["errors"]["destroyed, by elements"] = error_of(lambda _: by_elements.step(), rank)
    return found


def batch_sizes(rank: int) -> dict[str, list[int]]:
    found = {}
    for mode in ("ddp", "fsdp2", "hsdp", "tp", "fsdp2+tp"):
        model = MODES[mode](network())
        optimizer = rootfree.RFRMSprop(model.parameters())
        rootfree.track_batch_size(model, optimizer)
        train(model, optimizer, range(2), part=data_ranks(mode))
        found[mode] = [optimizer.batch_size]
    for mode in ("ddp", "fsdp2"):
        model = MODES[mode](network())
        optimizer = rootfree.RFRMSprop(model.parameters())
        rootfree.track_batch_size(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.randn(UNEQUAL[rank], 1, 4, 4, dtype=torch.float64)
            model(x).square().sum().backward()
            optimizer.step()
        found[f"{mode}, unequal"] = [optimizer.batch_size]
    return found


def sharded(shapes: tuple[tuple[int, ...], ...] = ((6, 4), (5,)), **given: Any) -> Any:
    params = [nn.Parameter(torch.ones(*shape)) for shape in shapes]
    return if_shampoo(params, **{"placement": rootfree.Sharded(), **given})


def other_rate(rank: int) -> None:
    optimizer = sharded()
    stepped_alone(optimizer)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + (rank == 2))
    stepped_alone(optimizer)


def other_shapes(rank: int) -> None:
    sharded(((6, 4), (5 + (rank == 1),)))


def other_options(rank: int) -> None:
    sharded(damping=1e-3 if rank == 3 else 1e-4)


def one_more_parameter(rank: int) -> None:
    sharded(((6, 4), (5,), *[(3, 3)] * (rank == 2)))


def other_names(rank: int) -> None:
    """The same shapes in another order."""
    names = ["a", "b"] if rank != 1 else ["b", "a"]
    if_shampoo(
        [(name, nn.Parameter(torch.ones(3, 3))) for name in names], placement=rootfree.Sharded()
    )


def bad_option(rank: int) -> None:
    """One rank finds it out by itself; the others would wait for it."""
    sharded(damping=-1.0 if rank == 3 else 1e-4)


def bad_option_of_shards(rank: int) -> None:
    model = MODES["fsdp2"](network())
    if_shampoo(model.parameters(), batch_size=0 if rank == 1 else 8)


def other_replicas(rank: int) -> None:
    sharded(placement=rootfree.Sharded(replicas=2 if rank == 0 else None))


def missing_shard(folder: Path, rank: int) -> None:
    """A file of the checkpoint is gone."""
    model = MODES["fsdp2"](network())
    optimizer = if_shampoo(model.parameters())
    train(model, optimizer, range(1), part=data_ranks("fsdp2"))
    checkpoint.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    dist.barrier()
    if rank == 0:
        next(folder.glob("__2_*.distcp")).unlink()
    dist.barrier()
    checkpoint.load({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)


def one_more_group(rank: int) -> None:
    optimizer = sharded()
    if rank == 0:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, 3))]})
    stepped_alone(optimizer)


def one_more_step(rank: int) -> None:
    optimizer = sharded()
    stepped_alone(optimizer)
    if rank == 1:
        for p in optimizer.param_groups[0]["params"]:
            optimizer.state[p]["step"] += 1
    stepped_alone(optimizer)


def save_or_step(rank: int) -> None:
    optimizer = sharded()
    optimizer.state_dict() if rank == 1 else stepped_alone(optimizer)


def missing_state(rank: int) -> None:
    optimizer = sharded()
    saved = rootfree.full_state_dict(optimizer)
    if rank == 2:
        del saved["state"][1]
    optimizer.load_state_dict(saved)


def other_state(rank: int) -> None:
    optimizer = sharded()
    saved = rootfree.full_state_dict(optimizer)
    if rank == 2:
        saved["state"][0]["block0.factor0"] = torch.ones(1, 7, 7)
    optimizer.load_state_dict(saved)


def too_small_a_mesh(rank: int) -> None:
    model = MODES["fsdp2"](network())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
    if_shampoo(model.parameters(), placement=rootfree.Sharded(mesh=mesh))


def three_replicas(rank: int) -> None:
    sharded(placement=rootfree.Sharded(replicas=3))


def split_layers(rank: int) -> None:
    rootfree.KFACRecorder(MODES["fsdp2+tp"](network()))


def second_derivatives(rank: int) -> None:
    rootfree.HutchinsonDiagonal(MODES["fsdp2"](network()))


def joint_pairs(rank: int) -> None:
    model = network()
    recorder = rootfree.KFACRecorder(model)
    if_shampoo(model.parameters(), curvature=recorder, placement=rootfree.Sharded())


def joint_shards(rank: int) -> None:
    model = MODES["fsdp2"](network())
    if_shampoo(model.parameters(), curvature=rootfree.KFACRecorder(model))


def recorded(rank: int, *, recording: bool, weight: float) -> None:
    model = MODES["fsdp2"](network())
    recorder = rootfree.KFACRecorder(model, joint=False, loss="mse")
    optimizer = if_shampoo(model.parameters(), curvature=recorder)
    with recorder.when(recording):
        z = model(torch.ones(2, 1, 4, 4, dtype=torch.float64))
        recorder.backward(weight * z.square().mean(), z)
    optimizer.step()


def recorded_elsewhere(rank: int) -> None:
    recorded(rank, recording=rank != 1, weight=1.0)


def no_average(rank: int) -> None:
    recorded(rank, recording=True, weight=4.0 if rank == 3 else 1.0)


CASES: dict[str, Callable[[int], Any]] = {
    "other rate": other_rate, "other shapes": other_shapes, "other options": other_options,
    "one more parameter": one_more_parameter, "other names": other_names,
    "bad option": bad_option, "bad option of shards": bad_option_of_shards,
    "other replicas": other_replicas,
    "one more group": one_more_group, "one more step": one_more_step,
    "save or step": save_or_step, "missing state": missing_state, "other state": other_state,
    "too small a mesh": too_small_a_mesh, "three replicas": three_replicas,
    "split layers": split_layers, "second derivatives": second_derivatives,
    "joint pairs": joint_pairs, "joint shards": joint_shards,
    "recorded elsewhere": recorded_elsewhere, "no average": no_average,
}  # fmt: skip


def error_of(case: Callable[[int], Any], rank: int) -> tuple[str, str, float]:
    """Kind and text of the error, and the seconds it took."""
    start = time.perf_counter()
    try:
        case(rank)
    except (Exception, checkpoint.CheckpointException) as error:  # the latter is no Exception
        return type(error).__name__, str(error), time.perf_counter() - start
    return "none", "", time.perf_counter() - start
