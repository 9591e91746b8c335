"""Starts ranks as forks of one process that has imported everything, and collects what they say.

Run as a script: launch.py MODULE WORLD,WORLD,... FOLDER. The worlds run one after another; in each,
every rank calls `MODULE.run(turn, folder)`, whose result is written to FOLDER/<turn>-<rank>.pt.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TESTS = Path(__file__).parents[1]
LIMIT = 900  # seconds, far more than it takes
#: what torch and the laboratory import when they need it, and every rank would import by itself
LATE = ("torch._dynamo", "sklearn.datasets", "rootfree.kernels.triton_kernels")


def results(
    module: str, worlds: tuple[int, ...], folder: Path, *, limit: int = LIMIT
) -> list[list[Any]]:
    """What every rank returned, by turn; of several test processes the first one starts them."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    try:
        (folder / "begun").touch(exist_ok=False)
    except FileExistsError:
        for _ in range(limit):
            if done.exists():
                break
            time.sleep(1)
    else:
        command = [sys.executable, __file__, module, ",".join(map(str, worlds)), str(folder)]
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",  # kernels run on a CPU for those who insist
        }
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=limit
        )
        done.write_text(run.stderr if run.returncode else "")
    assert done.read_text() == "", done.read_text()[-6000:]
    return [
        [torch.load(folder / f"{turn}-{r}.pt", weights_only=False) for r in range(world)]
        for turn, world in enumerate(worlds)
    ]


def rank(module: Any, turn: int, number: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    address = (folder / f"rendezvous-{turn}").as_uri()
    dist.init_process_group("gloo", init_method=address, rank=number, world_size=world)
    torch.save(module.run(turn, folder), folder / f"{turn}-{number}.pt")
    if dist.is_initialized():
        dist.barrier()


def main(name: str, worlds: list[int], folder: Path) -> None:
    module, *_ = map(importlib.import_module, (name, *LATE))
    for turn, world in enumerate(worlds):
        children = []
        for number in range(world):
            child = os.fork()
            if child == 0:
                try:
                    rank(module, turn, number, world, folder)
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
                # gloo's threads now and then abort the shutdown of the interpreter.
                os._exit(0)
            children.append(child)
        failed = False
        while children:
            child, status = os.wait()
            children.remove(child)
            if status != 0 and not failed:  # the others would wait for it
                failed = True
                for other in children:
                    os.kill(other, signal.SIGKILL)
        if failed:
            sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1], [int(world) for world in sys.argv[2].split(",")], Path(sys.argv[3]))
