"""timm: the optimizers of this library by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from timm.optim._optim_factory import OptimInfo, default_registry

import rootfree
from rootfree.shell.block_optimizer import BlockOptimizer
from rootfree.shell.optimizer import RootFreeOptimizer
from rootfree.shell.parameter_groups import COMPANION

__all__ = ["register"]


def register() -> list[str]:
    """Make ``timm.optim.create_optimizer_v2(model, "ifwhitening")`` work; returns the names.

    Names are those of the classes, in lower case. timm's groups work as they are: weight-decay
    filtering, and layer decay together with timm's schedulers, which read ``lr_scale``. What timm
    leaves to a fallback optimizer (``fallback_list``) goes to AdamW inside the same optimizer, with
    the options that :func:`rootfree.parameter_groups` gives it; ``companion_lr`` is its step size.
    To have all of embeddings, head and vectors there, give
    ``param_group_fn=rootfree.parameter_groups``.

    As timm always does, it sets ``weight_decay`` to 0 and ``momentum`` to 0.9 unless told
    otherwise.

    Example::

        register()
        optimizer = timm.optim.create_optimizer_v2(model, "ifwhitening", lr=2e-3, layer_decay=0.75)
    """
    for method in _methods():
        default_registry.register(
            OptimInfo(
                name=method.__name__.lower(),
                opt_class=partial(_make, method),  # type: ignore[arg-type]
                description=(inspect.getdoc(method) or "").split("\n")[0],
                has_eps=False,
                has_betas="betas" in method.options,
                has_momentum="momentum" in method.options,
            )
        )
    return [method.__name__.lower() for method in _methods()]


def _methods() -> list[type[RootFreeOptimizer]]:
    public = [getattr(rootfree, name) for name in rootfree.__all__]
    classes = [each for each in public if inspect.isclass(each) and not inspect.isabstract(each)]
    return [each for each in classes if issubclass(each, RootFreeOptimizer)]


def _make(
    method: type[RootFreeOptimizer],
    params: Iterable[Any],
    *,
    companion_lr: float | None = None,
    **options: Any,
) -> RootFreeOptimizer:
    has_companions = issubclass(method, BlockOptimizer)
    groups = [_group(each, companion_lr) if has_companions else each for each in params]
    make: Callable[..., RootFreeOptimizer] = method
    return make(groups, **options)


def _group(given: Any, companion_lr: float | None) -> Any:
    """timm's group as ours: what is for a fallback optimizer is for AdamW."""
    if not (isinstance(given, Mapping) and given.get("use_fallback")):
        return given
    own = {} if companion_lr is None else {"lr": companion_lr}
    return {**COMPANION, **own, **given, "companion": "adamw"}
