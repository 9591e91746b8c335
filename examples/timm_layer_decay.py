"""timm: an optimizer by its name, with layer decay, weight-decay filtering and timm's schedule.

    python examples/timm_layer_decay.py

Needs `pip install 'rootfree[integrations]'`.
"""

import argparse

import timm
import torch
from digits import accuracy, batches
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

import rootfree

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--epochs", type=int, default=5)
epochs = parser.parse_args().epochs

torch.manual_seed(0)
sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 2, "num_heads": 3}
pooling = {"class_token": False, "global_pool": "avg"}
model = timm.models.VisionTransformer(**sizes, **pooling, in_chans=1, num_classes=10)
rootfree.timm.register()
optimizer = create_optimizer_v2(
    model,
    "ifwhitening",
    lr=1e-2,
    weight_decay=0.05,  # not of biases and norms
    layer_decay=0.8,  # early layers move less
    fallback_list=("head.*", "*embed*"),  # left to AdamW
    companion_lr=1e-2,  # its step size
)
scheduler = CosineLRScheduler(optimizer, t_initial=epochs)
for group in optimizer.param_groups:
    method = group.get("companion") or "whitening"
    print(f"{method:>9}: {len(group['params']):2} parameters, scale {group['lr_scale']:.2f}")

for epoch in range(epochs):
    model.train()
    for images, labels in batches(32):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    scheduler.step(epoch + 1)
    print(f"epoch {epoch + 1}: test accuracy {accuracy(model):.1f} %")
