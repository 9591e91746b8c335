"""Parameter groups from a model, by the modules that own the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from rootfree.layout.tiles import cut
from rootfree.shell import roles
from rootfree.shell.checks import Optional, Real, boolean, learning_rate
from rootfree.shell.companion import companion_name

Options = Mapping[str, Any]
Overrides = Mapping[Any, Options]  # names, or types of modules

# What AdamW has for embeddings, heads and vectors. They take larger steps than whole networks do:
# twice torch's default. Larger steps need a denominator that follows faster, or the loss has
# spikes where it is nearly zero. The page *Which optimizer, which settings* compares the values.
COMPANION = {"lr": 2e-3, "betas": (0.9, 0.95)}
# The default of the matrix methods.
_BLOCK_SIZE = 1024


def parameter_groups(
    model: nn.Module,
    *,
    companion: str | None = "adamw",
    lr: float | Tensor | None = None,
    companion_lr: float | Tensor | None = None,
    weight_decay: float | None = None,
    no_decay_on_vectors: bool = True,
    overrides: Overrides | None = None,
) -> list[dict[str, Any]]:
    """The trainable parameters of a model in groups, for any matrix method of the library.

    Hidden weights (matrices and convolutions) go to the matrix method, all others to AdamW inside
    the same optimizer. What a parameter is follows from the module that owns it:

    - hidden: weights of linear, convolutional, recurrent and attention layers, and of layers of
      other packages that call their weight ``weight``. Low-rank pairs beside a frozen weight (LoRA)
      are hidden too, and so are stacked layers, such as experts: two or more parameters of one
      module that have three axes, the first of them common. The query, key and value maps that
      ``nn.MultiheadAttention`` packs into one weight get blocks of their own;
    - embedding: weights of ``nn.Embedding`` and ``nn.EmbeddingBag``, also where the head shares
      them;
    - head: the weight of the layer that is registered last, frozen layers included. A model has no
      head if that layer belongs to attention or recurrence, or to a block that has a sibling of the
      same type and shapes (a trunk). If no other trainable matrix exists, as in a logistic
      regression, the head counts as hidden;
    - vectors and scalars: parameters with fewer than two axes longer than one; weights of norms;
    - free parameters: all others, such as position tables. In a model without a layer beside the
      head, frozen layers included, they count as hidden: they are the matrices of a factorisation,
      or of layers written by hand.

    ``optimizer.summary()`` prints the role of every parameter. Correct a wrong one, such as a
    second head, with ``overrides``.

    Args:
        model: a module; of a compiled one, the module inside. Frozen parameters are left out.
        companion: "adamw", or None: the matrix method takes every parameter, and the vocabulary
            axis of embeddings gets a diagonal factor (in methods with the option ``structure``).
            Length alone is no sign of a vocabulary: the long axis of a linear layer is cut into
            blocks. Diagonal methods need None.
        lr: step size of the groups of the matrix method; None: the optimizer's.
        companion_lr: step size of AdamW; None: 2e-3, for networks that start from random weights.
            To train a network further, give the step size that AdamW would have, and ``lr`` too.
            Schedulers scale both alike. The groups have ``betas=(0.9, 0.95)``; AdamW's other
            options are torch's defaults. ``overrides`` change them.
        weight_decay: of all groups; None: the optimizer's.
        no_decay_on_vectors: vectors, scalars and norms get ``weight_decay=0``. With
            ``companion=None`` they do if ``weight_decay`` is given.
        overrides: options for some parameters, by the name of a parameter or of a module, or by a
            type of modules; names win over types, and longer names over shorter ones. For example
            ``{"actor.2": {"companion": "adamw"}, nn.Conv2d: {"lr": 1e-2}}``.

    Returns:
        Groups of named parameters, each with its ``role``; add options to them as you like.

    Example:
        >>> import torch, rootfree
        >>> layers = torch.nn.Embedding(50, 4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        >>> groups = rootfree.parameter_groups(torch.nn.Sequential(*layers), companion_lr=1e-2)
        >>> optimizer = rootfree.IFShampoo(groups, batch_size=32)
        >>> print(optimizer.summary())
        parameter  shape  role       preconditioner     state bytes
        1.weight   8x4    hidden     dense 8 x dense 4          457
        0.weight   50x4   embedding  AdamW                    1,604
        1.bias     8      vector     AdamW                       68
        2.bias     3      vector     AdamW                       28
        2.weight   3x8    head       AdamW                      196
        total      267               8.81 bytes each          2,353
    """
    companion = companion_name("companion", companion)
    lr = Optional(learning_rate)("lr", lr)
    companion_lr = Optional(learning_rate)("companion_lr", companion_lr)
    weight_decay = Optional(Real())("weight_decay", weight_decay)
    keeps_vectors = boolean("no_decay_on_vectors", no_decay_on_vectors)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # compiled
    named = _trainable(model)
    role_of, chosen = roles.roles_of(model), _chosen(model, overrides or {})
    keeps_vectors &= companion is not None or weight_decay is not None
    groups: list[dict[str, Any]] = []
    for name, p in named:
        role, own = role_of[p], chosen.get(p, {})
        mine = own.get("companion", None if role in roles.MATRICES else companion)
        # Without a companion all but the embeddings are in one group.
        options: dict[str, Any] = {"role": role} if companion or role in roles.TABLES else {}
        if mine:
            options |= COMPANION if companion_lr is None else COMPANION | {"lr": companion_lr}
        else:
            options |= _of_matrices(role, p, lr)
        if keeps_vectors and role in roles.VECTORS:
            options["weight_decay"] = 0.0
        elif weight_decay is not None:
            options["weight_decay"] = weight_decay
        options |= {key: value for key, value in own.items() if key != "companion"}
        if mine:
            options["companion"] = mine
        group = next((g for g in groups if g | options == g and len(g) == len(options) + 1), None)
        if group is None:
            group = {**options, "params": []}
            groups.append(group)
        group["params"].append((name, p))
    return sorted(groups, key=lambda group: "companion" in group)


def _of_matrices(role: str, p: Tensor, lr: float | Tensor | None) -> dict[str, Any]:
    options: dict[str, Any] = {} if lr is None else {"lr": lr}
    if role in roles.TABLES:
        options["structure"] = ("diagonal", "dense")
    elif role == roles.PACKED and (size := _packed_block_size(p.shape[1])):
        options["block_size"] = size
    return options


def _packed_block_size(d: int) -> int | None:
    """The largest block size that cuts (3d, d) at the multiples of d; None: there is none.

    >>> _packed_block_size(768), _packed_block_size(1280), _packed_block_size(1023)
    (768, 640, None)
    """
    for pieces in range(-(-d // _BLOCK_SIZE), 2 * -(-d // _BLOCK_SIZE) + 1):
        if d % pieces == 0 and cut(3 * d, d // pieces) == [(0, 3 * pieces, d // pieces)]:
            return d // pieces
    return None


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters with their names; an error if there are none, or lazy ones."""
    named = list(model.named_parameters())
    if not named:
        raise ValueError(f"model must have parameters, but this {type(model).__name__} has none")
    for name, p in named:
        if is_lazy(p):
            raise ValueError(
                f"parameter {name} has no shape yet: call the model once, then make the groups"
            )
    trainable = [(name, p) for name, p in named if p.requires_grad]
    if not trainable:
        raise ValueError(
            f"model must have trainable parameters, but all {len(named)} are frozen, "
            f"{named[0][0]} for one (requires_grad=False)"
        )
    return trainable


def _chosen(model: nn.Module, overrides: Overrides) -> dict[Tensor, dict[str, Any]]:
    """The options that overrides give each parameter; more specific ones win."""
    if not isinstance(overrides, Mapping):
        raise TypeError(f"overrides must be a mapping, got {type(overrides).__name__}")
    chosen: dict[Tensor, dict[str, Any]] = {}
    for key in sorted(overrides, key=lambda key: len(key) if isinstance(key, str) else -1):
        what, options = f"overrides[{getattr(key, '__name__', key)!r}]", overrides[key]
        if not isinstance(options, Mapping):
            raise TypeError(f"{what} must be a dict of options, got {options!r}")
        if {"params", "param_names"} & {*options}:
            raise ValueError(f"{what} must have options alone, got {sorted(options)}")
        companion_name(f"companion in {what}", options.get("companion"))
        params = [p for p in _meant(model, key, what) if p.requires_grad]
        if not params:
            raise ValueError(f"{what} must name trainable parameters, but has none")
        for p in params:
            chosen[p] = {**chosen.get(p, {}), **options}
    return chosen


def _meant(model: nn.Module, key: str | type[nn.Module], what: str) -> Iterable[Tensor]:
    """The parameters that a key of the overrides stands for."""
    if isinstance(key, type) and issubclass(key, nn.Module):
        return (p for each in model.modules() if isinstance(each, key) for p in each.parameters())
    if not isinstance(key, str):
        raise TypeError(f"{what} must be a name or a type of modules, got {type(key).__name__}")
    # A weight that is shared has several names.
    params = dict(model.named_parameters(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    if key in params:
        return [params[key]]
    if key in modules:
        return list(modules[key].parameters())
    close = get_close_matches(key, [*params, *modules], n=1)
    raise ValueError(
        f"{what} must name a parameter or a module of the model"
        + (f"; did you mean {close[0]!r}?" if close else "")
    )
