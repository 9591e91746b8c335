"""A model by name, timm's or the laboratory's, with random inputs of the shape that it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rootfree_lab import models
from rootfree_lab.config.reading import ConfigError, check_names
from rootfree_lab.data import Dataset, Split
from rootfree_lab.torchvision_shim import make_importable

Batch = tuple[Tensor, Tensor]

CONTEXT = 256  # tokens of a sequence


_NOTHING = Split(torch.empty(0), torch.empty(0))
#: the data that the laboratory's models are built for here, tried in this order
_DATA = tuple(
    Dataset("random", kind, _NOTHING, _NOTHING, None, classes, shape)
    for kind, classes, shape in (
        ("images", 10, (3, 32, 32)), ("tabular", 10, (64,)), ("text", 256, ()),
    )
)  # fmt: skip


@dataclass(frozen=True)
class Synthetic:
    """A model, and what its batches are like."""

    model: nn.Module
    shape: tuple[int, ...]  # of an example; () for text
    classes: int

    def draw(self, n: int, device: torch.device) -> Batch:
        """A batch of random inputs and targets."""
        if not self.shape:
            tokens = torch.randint(self.classes, (n, CONTEXT + 1), device=device)
            return tokens[:, :-1], tokens[:, 1:]
        x = torch.randn(n, *self.shape, device=device)
        return x, torch.randint(self.classes, (n,), device=device)


def build_model(name: str, option: str) -> Synthetic:
    """The model of this name: timm's with its own input size, else the laboratory's.

    `option` is the command-line option that messages name.
    """
    in_timm = _timm(name)
    if in_timm is not None:
        return Synthetic(in_timm, in_timm.default_cfg["input_size"], in_timm.num_classes)
    check_names(f"{option}: the model (of timm or)", [name], models.names())
    for data in _DATA:
        try:
            model = models.build(name, data)
        except ConfigError as error:
            if "is for data of the kind" in str(error):
                continue
            raise
        return Synthetic(model, data.shape, data.classes)
    raise ConfigError(f"{option}: the model {name!r} needs a graph, which cannot be made up")


def _timm(name: str) -> Any:
    try:
        make_importable()
        import timm
    except ModuleNotFoundError:
        return None
    if not timm.is_model(name):
        return None
    return timm.create_model(name, pretrained=False)
