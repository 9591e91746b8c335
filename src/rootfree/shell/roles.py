"""What each parameter of a model is for: a hidden weight, an embedding, the head, a vector, ...

Roles come from the modules that own the parameters, not from names.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import ParametrizationList

HIDDEN, PACKED, ADAPTER = "hidden", "attention q, k, v", "adapter"
EMBEDDING, TIED, HEAD = "embedding", "embedding and head", "head"
VECTOR, SCALAR, NORM, FREE = "vector", "scalar", "norm", "free parameter"

#: Roles of parameters that map hidden features to hidden features.
MATRICES = (HIDDEN, PACKED, ADAPTER)
#: Roles of parameters with an axis for a vocabulary, and of those that usually do not decay.
TABLES, VECTORS = (EMBEDDING, TIED), (VECTOR, SCALAR, NORM)

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# The last one is the output map of an attention layer.
_INSIDE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, NonDynamicallyQuantizableLinear)
_LAYERS = (nn.Linear, nn.Bilinear, _ConvNd, *_INSIDE)


class Owner(NamedTuple):
    """A module, where it is, and the parameters that it has itself."""

    path: str
    module: nn.Module
    params: dict[str, Tensor]


def roles_of(model: nn.Module) -> dict[Tensor, str]:
    """The role of every parameter, frozen ones included; see `parameter_groups` for the rules."""
    owners = _owners(model)
    roles: dict[Tensor, str] = {}
    layers = [owner for owner in owners if _is_layer(owner)]
    for owner in owners:
        for p in owner.params.values():
            role = _role(owner, p)
            # A shared weight is an embedding if any of its modules is one, a layer's otherwise.
            if p not in roles or role == EMBEDDING or roles[p] == FREE:
                roles[p] = role
    adapters = _adapters(owners)
    roles |= dict.fromkeys(adapters, ADAPTER)
    layers = [each for each in layers if adapters.isdisjoint(each.params.values())]
    head = _head(model, layers)
    if {p for each in layers for p in each.params.values()} <= head:
        # a factorisation, or layers written by hand: the matrices are free parameters
        roles |= {p: HIDDEN for p, role in roles.items() if role == FREE}
    hidden = {p for p, role in roles.items() if role in MATRICES and p.requires_grad}
    if hidden <= head:  # a regression, or a new head on a frozen model: there is no other matrix
        lone = {p for p in head if p.dim() > 1 and roles[p] == VECTOR}  # of a single output
        return roles | dict.fromkeys(set() if hidden else lone, HIDDEN)
    renamed = {HIDDEN: HEAD, EMBEDDING: TIED}
    return roles | {p: renamed.get(roles[p], roles[p]) for p in head}


def _owners(model: nn.Module) -> list[Owner]:
    """Modules with parameters of their own, in the order of their registration."""
    found: dict[str, Owner] = {}
    for path, module in model.named_modules():
        own = {key: p for key, p in module._parameters.items() if p is not None}
        if own and isinstance(module, ParametrizationList):
            # <layer>.parametrizations.<name>.original: a weight of the layer, in another form
            path, _, name = path.rpartition("parametrizations.")
            path, own = path.removesuffix("."), {f"{name}.{key}": p for key, p in own.items()}
        if own:
            owner = found.setdefault(path, Owner(path, model.get_submodule(path), {}))
            owner.params.update(own)
    return list(found.values())


def _role(owner: Owner, p: Tensor) -> str:
    if sum(d > 1 for d in p.shape) < 2:
        return SCALAR if p.numel() == 1 else VECTOR
    if _is_embedding(owner):
        return EMBEDDING
    if isinstance(owner.module, _NORMS):
        return NORM
    if not _is_layer(owner):
        return HIDDEN if p in _stacked(owner) else FREE
    return PACKED if p is getattr(owner.module, "in_proj_weight", None) else HIDDEN


def _stacked(owner: Owner) -> set[Tensor]:
    """Weights of layers that are stacked along one axis, such as experts: never one alone."""
    found = {p for p in owner.params.values() if p.dim() == 3 and min(p.shape) > 1}
    return found if len(found) > 1 and len({p.shape[0] for p in found}) == 1 else set()


def _is_embedding(owner: Owner) -> bool:
    if isinstance(owner.module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    return "Embedding" in type(owner.module).__name__ and "weight" in owner.params


def _is_layer(owner: Owner) -> bool:
    """Whether it is a layer of torch, or of another package with the same name for its weight."""
    if isinstance(owner.module, _NORMS) or _is_embedding(owner):
        return False
    weights = [p for key, p in owner.params.items() if key.partition(".")[0] == "weight"]
    return isinstance(owner.module, _LAYERS) or any(p.dim() > 1 for p in weights)


def _head(model: nn.Module, layers: list[Owner]) -> set[Tensor]:
    """The parameters of the last layer; none if it belongs to attention or to a repeated block."""
    if not layers or isinstance(layers[-1].module, _INSIDE):
        return set()
    names = layers[-1].path.split(".")
    for n in range(1, len(names)):
        parent = model.get_submodule(".".join(names[: n - 1]))
        block = model.get_submodule(".".join(names[:n]))
        others = [each for each in parent.children() if each is not block]
        if any(type(each) is type(block) and _shapes(each) == _shapes(block) for each in others):
            return set()
    return set(layers[-1].params.values())


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def _adapters(owners: list[Owner]) -> set[Tensor]:
    """Pairs A (r, i) and B (o, r) beside a frozen weight (o, i), or transposed: low-rank updates.

    Beside: the frozen weight is the wrapping module's own or a child's, A and B are its own,
    children's or grandchildren's.
    """
    frozen: dict[str, list[Tensor]] = defaultdict(list)
    small: dict[str, list[Tensor]] = defaultdict(list)
    for owner in owners:
        names = owner.path.split(".") if owner.path else []
        around = [".".join(names[:n]) for n in reversed(range(len(names) + 1))]  # inmost first
        for p in owner.params.values():
            if p.dim() == 2:
                for path in around[:3] if p.requires_grad else around[:2]:
                    (small if p.requires_grad else frozen)[path].append(p)
    found: set[Tensor] = set()
    for path, weights in frozen.items():
        shapes = {tuple(w.shape) for w in weights}
        for A, B in permutations(small[path], 2):
            (r, i), (o, s) = A.shape, B.shape
            if r == s < min(o, i) and ((o, i) in shapes or (i, o) in shapes):
                found |= {A, B}
    return found
