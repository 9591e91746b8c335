"""How many terms a loss averages: counted from inputs, checked by the gradient of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Size, Tensor, nn

Count = Callable[[tuple[Any, ...], dict[str, Any]], int]

#: the label that cross entropy ignores
IGNORED = -100
# Models that compare each token with the next: the first label of a sequence is never used.
_SHIFTING = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")


class Ids(int):
    """The number of token ids, with their shape: the loss may leave out some of them."""

    shape: Size

    def __new__(cls, ids: Tensor) -> Ids:
        """Count them."""
        number = super().__new__(cls, ids.numel())
        number.shape = ids.shape
        return number


def counter_of(count: Any, model: nn.Module) -> tuple[Count, bool]:
    """The function that counts, and whether its result is a guess that may deserve a warning."""
    if count is None or count == "examples":
        return first_length, count is None
    if count == "tokens":
        names = _positional_names(_inside(model)[-1])
        return partial(tokens, shifts=shifts_labels(model), names=names), False
    if callable(count):
        return count, False
    raise ValueError(f"count must be None, 'examples', 'tokens' or a function, got {count!r}")


def first_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The first axis of the first tensor in the arguments, positional ones first."""
    for tensor in tensors_in((args, kwargs)):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise ValueError("no tensor with an axis in the model's inputs: give track_batch_size a count")


def tokens(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, shifts: bool, names: Sequence[str] = ()
) -> int:
    """Labels that the loss averages over; without labels, the first tensor of ids (`Ids`).

    `shifts`: the model ignores the first label of each sequence, unless it gets `shift_labels`,
    which are shifted already. `names`: of the positional arguments.
    """
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    shifted = next(_named("shift_labels", (args, kwargs)), None)
    labels = labels_in(args, kwargs)
    if shifted is None and labels is not None:
        shifted = labels[..., 1:] if shifts else labels
    if shifted is not None:
        return int((shifted != IGNORED).sum())
    for tensor in tensors_in((args, kwargs)):
        if tensor.dim() > 0 and _is_integer(tensor):
            return Ids(tensor)
    raise ValueError(
        "count='tokens' found no labels and no tensor of token numbers in the model's inputs: give "
        "track_batch_size a function as count"
    )


def class_axis(shape: Size, ids: Size) -> int | None:
    """The axis of an output that the token ids lack; None: their positions do not match."""
    if shape[:-1] in (ids, Size([ids.numel()])):
        return -1
    return 1 if len(shape) > 2 and Size([shape[0], *shape[2:]]) == ids else None


def labels_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The labels among the arguments, if there are any."""
    return next(_named("labels", (args, kwargs)), None)


def doubt_about_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What in the inputs speaks against a count of examples."""
    first = next((t for t in tensors_in((args, kwargs)) if t.dim() > 0), None)
    if first is None or not _is_integer(first) or first[0].numel() < 2:
        return None
    return (
        f"the model's first input has whole numbers of shape {tuple(first.shape)}. If these are "
        "tokens, and the loss is a mean over tokens, give count='tokens'"
    )


def doubt_about_loss(gradient: Tensor, counted: int) -> str | None:
    """What in the gradient of the loss with respect to the output speaks against a count.

    The gradient of cross entropy sums to zero over the classes, or is nonzero for one class only,
    or is zero where the label is ignored. Any other loss is taken for a mean over all numbers.
    """
    g = gradient.detach().float()
    axes = (1, g.dim() - 1) if g.dim() > 1 else ()
    classes = next((axis for axis in axes if _is_cross_entropy(g, axis)), None)
    rows = g if classes is None else g.any(classes)
    terms = rows.numel() if classes is None else int(rows.sum()) or rows.numel()
    if terms in (counted, 0):
        return None
    kind = "its gradient is not that of a cross entropy" if classes is None else "cross entropy"
    return (
        f"the model's output has shape {tuple(g.shape)}; if the loss ({kind}) is a mean over "
        f"{terms} numbers, not over {counted}, give a function as count"
    )


def _is_cross_entropy(g: Tensor, axis: int) -> bool:
    sums, sizes = g.sum(axis).abs(), g.abs().sum(axis)
    single = bool(((g != 0).sum(axis) <= 1).all()) and g.shape[axis] > 1
    # In half precision the sum is off by some hundredths.
    return single or bool((sums <= 0.02 * sizes).all())


def _is_integer(tensor: Tensor) -> bool:
    others = (torch.bool, torch.uint8)  # images
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in others)


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model, or what it wraps, compares each token with the next."""
    kinds = (kind for each in _inside(model) for kind in type(each).__mro__)
    return any(kind.__name__.endswith(_SHIFTING) for kind in kinds)


def _inside(model: nn.Module) -> list[Any]:
    """A model and the models that it wraps (compiled, data-parallel), outermost first."""
    seen: list[Any] = [model]
    while len(seen) < 8:
        inner = getattr(seen[-1], "_orig_mod", getattr(seen[-1], "module", None))
        if not isinstance(inner, nn.Module):
            break
        seen.append(inner)
    return seen


def _positional_names(model: nn.Module) -> list[str]:
    """The names of a model's positional arguments; empty if they are not known."""
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # compiled by torch.jit, say
        return []
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _named(name: str, tree: Any) -> Iterator[Tensor]:
    """Tensors with a name in nested dicts and dataclasses, outer ones first."""
    inside = _inside_of(tree)
    yield from (value for key, value in inside if key == name and isinstance(value, Tensor))
    for _, value in inside:
        yield from _named(name, value)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors in a nested structure, in order."""
    if isinstance(tree, Tensor):
        yield tree
    for _, value in _inside_of(tree):
        yield from tensors_in(value)


def _inside_of(tree: Any) -> list[tuple[Any, Any]]:
    """The members of a container, with their names or numbers."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (tuple, list)):
        return list(enumerate(tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in fields(tree)]
    return []
