"""Lets torchvision, and timm with it, be imported beside a torch of another build.

The torchvision wheel carries compiled operators for one build of torch. Beside another one (the
CPU-only torch, say) they cannot be loaded, and the import dies on "operator torchvision::nms does
not exist" although nothing here uses them. Declaring the operators is all the import needs.
"""

from __future__ import annotations

import functools
import importlib

import torch

#: The operators whose shapes torchvision describes to torch while it is imported.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


@functools.cache
def make_importable() -> bool:
    """Import torchvision, with the missing operators declared where that is what it takes.

    Returns whether they had to be. Calling a declared operator is still an error: it has no
    implementation. Where torchvision works nothing is changed; where it is not installed the
    import's own error is raised.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                _library().define(schema)
        importlib.import_module("torchvision")
        return True
    return False


@functools.cache
def _library() -> torch.library.Library:
    # Declarations live as long as this object.
    return torch.library.Library("torchvision", "FRAGMENT")
