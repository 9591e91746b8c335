"""What all recorders share: the context, the extra backward passes, checks, the summary."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from rootfree.curvature import ParameterCurvature
from rootfree.recorders.grams import wide_dtype
from rootfree.recorders.losses import LOSSES, check_exact
from rootfree.recorders.ranks import Ranks
from rootfree.recorders.soundness import WholeGradients, which_have_examples_first
from rootfree.shell.loss_terms import first_length

# Gradients in half precision are off by under one part in a hundred.
_TOLERANCE = 1.05


class Recorder(ABC):
    """Base of the recorders: one context a step, around forward and backward.

    Hooks are on the model only inside the context. What an earlier context recorded is dropped when
    a new one is entered, so that steps without a refresh, and steps that a gradient scaler skips,
    leave nothing behind; micro-batches of one step go into one context.
    """

    samples: int  # draws of targets or probes, in recorders that have them
    _hint = ""  # how `backward` is to be called, for messages
    _rows: tuple[int, ...] = ()  # axes of a `_sum_of` before those of the parameter
    _records: dict[Any, Any]  # by parameter, layer or module: what `of` uses
    _context: object  # gradients of an earlier context's graphs are not counted
    _reduced: bool  # whether the ranks' recordings are summed up
    _terms: list[int]  # loss terms seen by `backward`, in each way of counting them
    _weight: Tensor | None  # lower bound on the weight of a term in the loss
    _size = 1  # ranks that average gradients, when the context was entered
    _n: int | None  # examples in the model's input; None: not known
    _passing = False  # whether passes of the recorder's own are under way
    _unclear: list[tuple[Any, Any]]  # who may have its examples elsewhere, with its output's edge

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: str | None = None,
        scaler: Any = None,
        seed: int | None = None,
        process_group: Any = "world",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if loss is not None and loss not in LOSSES:
            raise ValueError(f"loss must be one of {', '.join(LOSSES)} or None, got {loss!r}")
        self.model = model
        self.loss = loss
        self.scaler = scaler
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._ranks = Ranks(process_group)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._parameters = dict(model.named_parameters())
        self._open = False
        self._skipping = False
        self._handles: list[Any] = []
        self._trusted: set[int] = set()  # batch sizes whose scale was found right
        self._whole = WholeGradients()
        self._drop()

    def _install(self) -> list[Any]:
        """Put hooks on the model; their handles are removed when the context is left."""
        return []

    def _before_model(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """A hook: how many examples there are."""
        try:
            self._n = first_length(args, kwargs)
        except ValueError:  # no tensor among them: the layers know themselves
            self._n = None

    def _verify(self) -> None:
        """Leave out parameters whose recordings are not the whole truth, with a warning."""
        return  # nothing is recorded by hooks, unless a recorder says otherwise

    def _warn(self, p: Tensor, reason: str) -> None:
        warnings.warn(
            f"{type(self).__name__}: parameter {self._names[id(p)]} keeps the gradient outer "
            f"product, because {reason}",
            stacklevel=2,
        )

    def _before_backward(self, loss: Tensor, outputs: Tensor | None) -> None:
        """The passes that `backward` makes in addition to the ordinary one."""
        return  # none, unless a recorder says otherwise

    def _reduce(self) -> None:
        """Bring together what several ranks recorded; called once between recording and use."""
        self._ranks.sum_([self._sum_of(p) for p in self.model.parameters() if p.requires_grad])

    @abstractmethod
    def _describe(self, p: nn.Parameter) -> str:
        """What curvature `p` gets, for `summary()`."""

    @abstractmethod
    def of(self, p: Tensor, *, batch_size: int) -> ParameterCurvature | None:
        """H of the loss by `p`; see :class:`rootfree.Curvature`."""

    def __enter__(self) -> Self:
        if self._open or self._skipping:
            raise RuntimeError(f"{type(self).__name__} is entered already")
        self._check_model()
        self._drop()
        self._size = self._ranks.size
        self._looks = {name: _look(p) for name, p in self._parameters.items()}
        self._handles = self._install()
        self._open = True
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._open = False

    def when(self, due: bool) -> AbstractContextManager[Recorder]:
        """The recorder as a context that records only if `due`, for steps that do not refresh.

        ``with recorder.when(step % 2 == 0):`` keeps the other steps free of cost; ``backward`` is
        then the ordinary one.
        """
        return self if due else self._skip()

    @contextmanager
    def _skip(self) -> Iterator[Recorder]:
        if self._open or self._skipping:
            raise RuntimeError(f"{type(self).__name__} is entered already")
        self._drop()
        self._skipping = True
        try:
            yield self
        finally:
            self._skipping = False

    def _settled(self, output: Any) -> list[tuple[Any, bool]]:
        """Who was unclear in this forward pass, and whether its examples do come first."""
        unclear, self._unclear = self._unclear, []
        if not unclear:
            return []
        self._passing = True
        try:
            found = which_have_examples_first(output, self._n, [edge for _, edge in unclear])
        finally:
            self._passing = False
        return [(who, first) for (who, _), first in zip(unclear, found, strict=True)]

    def backward(self, loss: Tensor, outputs: Tensor | None = None) -> None:
        """``loss.backward()`` and the extra passes that the recorder needs.

        Args:
            loss: the loss of a (micro-)batch; with a gradient scaler, the scaled one.
            outputs: what the loss was computed from: the logits as ``F.cross_entropy`` takes them,
                or the predictions of ``F.mse_loss``. With them, the recorder raises an error if
                ``batch_size`` claims an average and the loss is not one.
        """
        if self._open:
            self._passing = True
            try:
                self._before_backward(loss, outputs)
            finally:
                self._passing = False
        elif not self._skipping:
            raise RuntimeError(f"backward() of a {type(self).__name__} outside its context")
        if not self._open or self.loss is None or outputs is None:
            loss.backward()
            return
        gradients: list[Tensor] = []
        handle = outputs.register_hook(gradients.append)
        loss.backward()
        handle.remove()
        z = outputs.detach()
        terms = LOSSES[self.loss].terms(z)
        self._terms = [a + b for a, b in zip(self._terms or [0] * len(terms), terms, strict=True)]
        for g in gradients:
            scale = self._scale_of(g)
            w = LOSSES[self.loss].weight(z.float(), g.float() / scale, loss.detach() / scale)
            self._weight = w if self._weight is None else torch.maximum(self._weight, w)

    def _scale_of(self, like: Tensor) -> Tensor | float:
        """By what the gradient scaler has multiplied the loss."""
        if self.scaler is None:
            return 1.0
        scale: Tensor = self.scaler.scale(torch.ones((), device=like.device))
        return scale

    def _drawn(
        self, outputs: Tensor, inputs: Sequence[Any], *, exact: bool = False
    ) -> Iterator[tuple[Tensor | None, ...]]:
        """Gradients by `inputs` of the *summed* loss with targets ŷ ~ model, once a sample.

        With `exact`, those of the columns of a root of the loss's Hessian, once a column.
        """
        assert self.loss is not None
        loss = LOSSES[self.loss]
        z = outputs.detach().to(wide_dtype(outputs.dtype))
        if exact:
            check_exact(self.loss, z, examples=self._n)
        draws = (loss.sample(z, self._generator(z.device)) for _ in range(self.samples))
        for v in loss.roots(z) if exact else draws:
            v = v.to(outputs.dtype)
            yield torch.autograd.grad(outputs, inputs, v, retain_graph=True, allow_unused=True)

    def _generator(self, device: torch.device) -> torch.Generator:
        """The recorder's own random numbers, so that recording does not change training.

        Ranks hold different examples: the same draws on all of them would be correlated, and the
        sum of what they sampled biased.
        """
        if device not in self._generators:
            seed = torch.initial_seed() if self._seed is None else self._seed
            seed = (seed + self._ranks.rank) % 2**63
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]

    def _sum_of(self, p: Tensor) -> Tensor:
        """What is summed up for `p`, zeros at first."""
        if id(p) not in self._records:
            shape, dtype = (*self._rows, *p.shape), wide_dtype(p.dtype)
            self._records[id(p)] = torch.zeros(shape, dtype=dtype, device=p.device)
        total: Tensor = self._records[id(p)]
        return total

    def joint(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Pairs (weight, bias) that are one matrix; see :class:`rootfree.Curvature`."""
        return ()

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise RuntimeError when there is nothing recorded that fits these parameters."""
        name = type(self).__name__
        if not self._records:
            raise RuntimeError(
                f"{name} has recorded no backward pass since the last step: run forward and "
                f"backward inside `with recorder:`{self._hint}. Hooks do not reach into "
                "a model compiled by torch.compile: record the model it was made from"
            )
        self._check_model()
        for key, p in self._parameters.items():
            if _look(p) != self._looks[key]:
                raise RuntimeError(
                    f"parameter {key} was {self._looks[key]} when the {name} recorded and is "
                    f"{_look(p)} now: run forward and backward again"
                )
        if not any(id(p) in self._names for p in params):
            raise RuntimeError(f"none of the optimizer's parameters belongs to the {name}'s model")
        if not self._reduced:
            self._verify()
        if self._size > 1 and not self._reduced:
            self._reduce()
        self._reduced = True

    def used(self) -> None:
        """Drop what was recorded: the optimizer calls it at the end of a step that used it."""
        self._drop()

    def _drop(self) -> None:
        self._records = {}
        self._context = object()
        self._reduced = False
        self._terms = []
        self._weight = None
        self._n = None

    def _check_model(self) -> None:
        now = dict(self.model.named_parameters())
        for name, p in self._parameters.items():
            if now.get(name) is not p:
                raise RuntimeError(
                    f"parameter {name} of the model was replaced since the "
                    f"{type(self).__name__} was made: make a new one, and a new optimizer"
                )

    def _check_batch_size(self, batch_size: int) -> None:
        """Raise RuntimeError where the loss seen by `backward` contradicts `batch_size`."""
        if self._weight is None:
            return
        terms = [count * self._size for count in self._terms]
        if batch_size not in (*terms, 1):
            raise RuntimeError(
                f"the loss had {' or '.join(map(str, dict.fromkeys(terms)))} terms, but "
                f"batch_size is {batch_size}. batch_size is the number of terms that the loss "
                "averages, over all micro-batches and ranks, or 1 for a summed loss"
            )
        if batch_size in self._trusted:
            return  # looked at once: reading the scale waits for the device
        # gradients of a rank are those of its own average
        excess = float(self._weight) * batch_size / self._size
        if excess > _TOLERANCE:
            raise RuntimeError(
                f"batch_size={batch_size} says that the loss is an average, but its gradient is "
                f"at least {excess:.3g} times that of one: average the loss over its "
                f"{terms[0]} terms, or set batch_size=1 for a summed loss"
            )
        self._trusted.add(batch_size)

    def summary(self) -> str:
        """A table: parameter, shape, curvature."""
        rows = [("parameter", "shape", "curvature")]
        for name, p in self.model.named_parameters():
            shape = "x".join(map(str, p.shape)) or "scalar"
            rows.append((name, shape, self._describe(p) if p.requires_grad else "frozen"))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def _look(p: Tensor) -> str:
    return f"{tuple(p.shape)} on {p.device}"
