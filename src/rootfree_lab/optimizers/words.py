"""Options in the words of this library, as every method has them in its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch

from rootfree_lab.config.reading import ConfigError, check_names
from rootfree_lab.optimizers.methods import METHODS

_PLACE = re.compile(r"(1 - )?(\w+)(?:\[(\d)\])?\Z")


def translated(
    name: str, signature: Mapping[str, inspect.Parameter], options: Mapping[str, Any]
) -> dict[str, Any]:
    """A method's own options, from those and the common words."""
    words = METHODS[name].words
    own = [
        key
        for key, parameter in signature.items()
        if key not in ("params", "batch_size") and parameter.kind is not parameter.VAR_KEYWORD
    ]
    prefix = ("companion", "companion_options") if METHODS[name].is_matrix else ()
    allowed = list(dict.fromkeys([*own, *words, *prefix]))
    values: dict[str, Any] = {}
    check_names(f"the option of {name},", options, allowed)
    for key, value in options.items():
        if key in own:
            if isinstance(signature[key].default, float):
                _check_number(name, key, value)
            values[key] = _plain(key, value)
    for word, place in words.items():
        if word not in options or word in own:
            continue
        minus, key, element = _PLACE.findall(place)[0]
        if key in options:
            raise ConfigError(f"{name}: {word} and {key} are the same thing; give one of them")
        if minus:
            _check_number(name, word, options[word])
        value = 1 - options[word] if minus else _plain(word, options[word])
        if element:
            pair = list(values.get(key, signature[key].default))
            pair[int(element)] = value
            value = tuple(pair)
        values[key] = value
    return values


def _check_number(name: str, key: str, value: Any) -> None:
    """A word in the place of a number: torch's own error would not say which one."""
    if isinstance(value, (str, bool)):
        raise ConfigError(f"{name}: {key} must be a real number, got {value!r}")


def _plain(key: str, value: Any) -> Any:
    """A value of a TOML file as Python has it: a dtype for its name, tuples, integer keys."""
    if key.endswith("dtype") and key not in ("root_dtype", "storage_dtype", "q_dtype"):
        dtype = getattr(torch, value, None) if isinstance(value, str) else value
        if value is not None and not isinstance(dtype, torch.dtype):
            raise ConfigError(f"{key} must be the name of a torch dtype, got {value!r}")
        return dtype
    if isinstance(value, list):
        return tuple(value)
    if key == "structure" and isinstance(value, Mapping):
        return {int(axes): _plain(key, entry) for axes, entry in value.items()}
    return value
