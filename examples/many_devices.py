"""DDP with divided state, or FSDP2: the same script.

    torchrun --nproc-per-node=2 examples/many_devices.py
    torchrun --nproc-per-node=2 examples/many_devices.py --fsdp

Without GPUs the ranks are processes on the CPU.
"""

import argparse

import torch
import torch.distributed as dist
from digits import digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import rootfree

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--fsdp", action="store_true")
parser.add_argument("--steps", type=int, default=60)
options = parser.parse_args()

dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
X, Y, X_test, Y_test = (each.to(device) for each in digits())

torch.manual_seed(0)  # all ranks start from the same weights
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
if options.fsdp:
    for layer in (model[1], model[3]):
        fully_shard(layer)
    fully_shard(model)
    placement = None  # parameters are sharded, so blocks are divided anyway
else:
    model = DistributedDataParallel(model)
    placement = rootfree.Sharded()  # every rank keeps and updates a part of the blocks
optimizer = rootfree.IFShampoo(rootfree.parameter_groups(model), lr=1e-2, placement=placement)
rootfree.track_batch_size(model, optimizer)  # adds up what the ranks see

generator = torch.Generator().manual_seed(1)
for _ in range(options.steps):
    chosen = torch.randint(len(X), (64,), generator=generator)[rank::world]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(X[chosen]), Y[chosen]).backward()
    optimizer.step()
right = (model(X_test).argmax(1) == Y_test).float().mean()
if rank == 0:
    print(optimizer.summary())
    print(f"{world} ranks, B = {optimizer.batch_size}, test accuracy {100 * right:.1f} %")
dist.destroy_process_group()
