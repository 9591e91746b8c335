"""Recorders with hooks on modules, and the checks that what the hooks see is enough."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch._compile import _disable_dynamo

from rootfree.placement.local import is_sharded
from rootfree.recorders.recorder import Recorder
from rootfree.recorders.soundness import (
    NOT_FIRST,
    UNCLEAR,
    WholeGradients,
    which_have_examples_first,
)
from rootfree.shell.loss_terms import first_length


class HookedRecorder(Recorder):
    """Base of the recorders with hooks on modules."""

    #: (weight or module, edge of its output) where the examples may not be on the first axis
    _unclear: list[tuple[Any, Any]]
    _late: list[Tensor]  # sharded parameters, whose gradients are looked at when they are whole

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._whole = WholeGradients()
        self._refused: set[Any] = set()  # weights or modules whose recordings would be wrong
        self._examples_first: set[Any] = set()  # those whose examples are known to come first

    @abstractmethod
    def _hooks(self) -> list[Any]:
        """Put hooks on modules."""

    @abstractmethod
    def _hooked(self) -> Iterable[Tensor]:
        """The parameters of modules with hooks."""

    def _refuse(self, who: Any, reason: str) -> None:
        """Record no more of a weight or module."""
        self._refused.add(who)

    def _counts(self, context: object) -> bool:
        """Whether a gradient is recorded that comes now, in a graph made in this context."""
        return self._open and context is self._context and not self._passing

    def _install(self) -> list[Any]:
        self._whole.begin()
        self._unclear = []
        params = list(self._hooked())
        self._late = [p for p in params if is_sharded(p)]
        whole = {p: p for p in params if not is_sharded(p)}
        return [
            self.model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            self.model.register_forward_hook(self._after_model),
            *self._whole.install(whole, self._scale_of),
            *self._hooks(),
        ]

    def _before_model(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Count the examples."""
        try:
            self._n = first_length(args, kwargs)
        except ValueError:  # the input has no tensor
            self._n = None

    @_disable_dynamo
    def _after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        """Find out on which of two axes as long as the batch the examples are."""
        # Sharded parameters are whole once the forward pass has used them.
        late, self._late = self._late, []
        leaves = dict(zip(late, self._leaves(late), strict=True))
        self._handles += self._whole.install(leaves, self._scale_of)
        unclear, self._unclear = self._unclear, []
        if not unclear:
            return
        found: list[bool | None]
        if self._sharded:  # the pass would gather parameters, and other ranks may not make it
            found = [False] * len(unclear)
        else:
            self._passing = True
            try:
                found = which_have_examples_first(output, self._n, [edge for _, edge in unclear])
            finally:
                self._passing = False
        for (who, _), first in zip(unclear, found, strict=True):
            if first:
                self._examples_first.add(who)
            elif first is not None:  # else it stays unclear, and asks again
                self._refuse(who, UNCLEAR if self._sharded else NOT_FIRST)

    def _warn(self, p: Tensor, reason: str) -> None:
        warnings.warn(
            f"{type(self).__name__}: parameter {self._names[p]} keeps the gradient outer "
            f"product, because {reason}",
            stacklevel=2,
        )
