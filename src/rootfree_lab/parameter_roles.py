"""Which parameters of a model a matrix method takes, and which its companion: said here only."""

from __future__ import annotations

from torch import nn

NamedParameters = list[tuple[str, nn.Parameter]]

#: Parameters with several axes that are tables or per-channel numbers, not maps between features:
#: positions and tokens of vision transformers, the decays of state-space models, the attention of
#: graphs.
_TABLES = (
    "pos_embed", "cls_token", "reg_token", "relative_position_bias_table", "A_log", "att_src",
    "att_dst",
)  # fmt: skip


def trainable(model: nn.Module) -> NamedParameters:
    """Every parameter that is trained, once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def split_parameters(
    model: nn.Module, *, two_axes: bool = False
) -> tuple[NamedParameters, NamedParameters]:
    """(hidden matrices, the rest).

    A hidden matrix maps hidden features to hidden features: at least two axes longer than one, not
    an embedding, not the head (the model's last linear layer). With `two_axes` only parameters that
    are stored with exactly two axes count, so no convolutions.
    """
    apart = _embeddings_and_head(model)
    matrices: NamedParameters = []
    rest: NamedParameters = []
    for name, p in trainable(model):
        fits = p.dim() == 2 if two_axes else sum(d > 1 for d in p.shape) >= 2
        table = name.rpartition(".")[2] in _TABLES
        (matrices if fits and not table and id(p) not in apart else rest).append((name, p))
    return matrices, rest


def _embeddings_and_head(model: nn.Module) -> set[int]:
    apart: set[int] = set()
    head: object = None
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            apart.add(id(module.weight))
        elif isinstance(module, nn.Linear) or type(module).__name__ == "Linear":
            head = module.weight  # PyTorch Geometric has a class of its own, of that name
    if head is not None:
        apart.add(id(head))
    return apart
