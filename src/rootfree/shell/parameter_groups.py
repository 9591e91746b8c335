"""Parameter groups from a model: what its modules say about their parameters."""

from __future__ import annotations

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The trainable parameters of a model in groups, for any optimizer of the library.

    The vocabulary axis of an embedding gets a diagonal factor. Length alone is no sign of a
    vocabulary: the long axis of a linear layer is cut into blocks.

    Args:
        model: its ``nn.Embedding`` and ``nn.EmbeddingBag`` weights, tied ones included, form a
            group with ``structure=("diagonal", "dense")``, all other parameters another one.

    Returns:
        Groups of named parameters; add options to them as you like.

    Example:
        >>> import torch, rootfree
        >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 4), torch.nn.Linear(4, 3))
        >>> optimizer = rootfree.IFShampoo(rootfree.parameter_groups(model), batch_size=32)
        >>> print(*optimizer.summary().splitlines()[3].split()[:7])
        0.weight 50x4 diagonal 50 x dense 4
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    vocabularies = {
        module.weight
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and min(module.weight.shape) > 1
    }
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [(name, p) for name, p in named if p not in vocabularies]},
        {
            "params": [(name, p) for name, p in named if p in vocabularies],
            "structure": ("diagonal", "dense"),
        },
    ]
    return [group for group in groups if group["params"]]
