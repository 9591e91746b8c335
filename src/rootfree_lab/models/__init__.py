"""Models by name, or a user's own: `build(name, dataset, **options)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from rootfree_lab.config import own_code
from rootfree_lab.config.needed import need
from rootfree_lab.config.reading import ConfigError, check_names
from rootfree_lab.data import Dataset
from rootfree_lab.models import graphs, language, small, timm_images, vmamba

__all__ = ["build", "check", "names"]


Builder = Callable[..., nn.Module]

_IMAGES: tuple[Builder, ...] = (
    small.small_cnn,
    small.small_vit,
    timm_images.resnet18,
    timm_images.resnet34,
    timm_images.resnet50,
    timm_images.vgg16_bn,
    timm_images.densenet121,
    timm_images.swin_tiny,
    timm_images.gcvit_xxtiny,
    timm_images.focalnet_tiny_srf,
    timm_images.vit_tiny,
    timm_images.vit_small,
    timm_images.vit_base,
    timm_images.resnet_micro,
    timm_images.vgg_micro,
    timm_images.densenet_micro,
    timm_images.swin_micro,
    timm_images.gcvit_micro,
    timm_images.focalnet_micro,
)
_FEATURES: tuple[Builder, ...] = (small.linear, small.logistic, small.mlp)
_TEXT: dict[str, Builder] = {
    "lstm": language.LSTMLanguageModel,
    "lstm_micro": language.lstm_micro,
    "gpt": language.GPT,
    "gpt_micro": language.gpt_micro,
}
_GRAPHS: dict[str, Builder] = {"gat": graphs.GraphAttention, "gamlp": graphs.GraphMLP}

#: name -> (builder, the kinds of data it is for)
_MODELS: dict[str, tuple[Builder, tuple[str, ...]]] = {
    **{builder.__name__: (builder, ("tabular", "images")) for builder in _FEATURES},
    **{builder.__name__: (builder, ("images",)) for builder in _IMAGES},
    "vmamba_tiny": (vmamba.VMamba, ("images",)),
    "vmamba_micro": (vmamba.vmamba_micro, ("images",)),
    **{name: (builder, ("text",)) for name, builder in _TEXT.items()},
    **{name: (builder, ("graph",)) for name, builder in _GRAPHS.items()},
}


def names() -> list[str]:
    """The names that `build` knows."""
    return list(_MODELS)


def check(name: str, dataset: Dataset, options: Mapping[str, Any]) -> None:
    """Raise what `build` would for a wrong name, kind of data or option, or a missing package."""
    if own_code.is_own(name):
        own_code.check_arguments(
            f"the model {own_code.shown(name)}", own_code.load("model.name", name), options,
            ["dataset"],
        )  # fmt: skip
        return
    check_names("the model", [name], _MODELS)
    builder, kinds = _MODELS[name]
    package = _package(builder)
    if package is not None:
        need(f"the model {name!r}", package)
    if dataset.kind not in kinds:
        raise ConfigError(
            f"the model {name!r} is for data of the kind {' or '.join(kinds)}, got {dataset.kind}"
        )
    allowed = list(inspect.signature(builder).parameters)[1:]
    check_names(f"the option of the model {name!r},", options, allowed)


def _package(builder: Builder) -> str | None:
    """The package that a builder imports."""
    if builder in _GRAPHS.values():
        return "torch_geometric"
    with_timm = (timm_images.__name__, vmamba.__name__)
    return "timm" if builder is small.small_vit or builder.__module__ in with_timm else None


def build(name: str, dataset: Dataset, **options: Any) -> nn.Module:
    """The model of this name for the data, freshly initialised from torch's global generator."""
    check(name, dataset, options)
    if own_code.is_own(name):
        return _build_own(name, dataset, options)
    builder, _ = _MODELS[name]
    try:
        return builder(dataset, **options)
    except (TypeError, AssertionError, RuntimeError, ZeroDivisionError) as error:
        raise ConfigError(f"the model {name!r} cannot be built with {options}: {error}") from error


def _build_own(name: str, dataset: Dataset, options: Mapping[str, Any]) -> nn.Module:
    """A user's model; it gets the data set where it has an argument of that name."""
    what, builder = f"the model {own_code.shown(name)}", own_code.load("model.name", name)
    taken = own_code.check_arguments(what, builder, options, ["dataset"])
    model = own_code.call(what, builder, {**dict.fromkeys(taken, dataset), **options})
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{what} must return a torch.nn.Module, got {type(model).__name__}")
    return model
