"""What all recorders share: the context, the extra backward passes, checks, the summary."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from rootfree.curvature import ParameterCurvature
from rootfree.placement.local import is_sharded
from rootfree.placement.unsharded import split_inside, unsharded
from rootfree.recorders.losses import LOSSES, LossScale, check_exact
from rootfree.recorders.places import replaced_in, spots_of
from rootfree.recorders.ranks import GradientRanks
from rootfree.structures.base import wide_dtype


class Recorder(ABC):
    """Base of the recorders: one context a step, around forward and backward.

    Hooks are on the model only inside the context. What an earlier context recorded is dropped when
    a new one is entered, so that steps without a refresh, and steps that a gradient scaler skips,
    leave nothing behind; micro-batches of one step go into one context.
    """

    samples: int  # draws of targets or probes, in recorders that have them
    _hint = ""  # how `backward` is to be called, for messages
    _rows: tuple[int, ...] = ()  # axes of `_sum_of` that come before those of the parameter
    _records: dict[Any, Any]  # what `of` uses, by parameter, layer or module
    _context: object  # identifies the context: gradients of earlier graphs do not count
    _reduced: bool  # whether the ranks have summed up their recordings
    _used: bool  # whether a step has used up what was recorded last
    _size = 1  # the number of ranks that average gradients, when the context was entered
    _divisor = 1.0  # the sum of their gradients is divided by this
    _n: int | None  # the number of examples in the model's input; None: not known
    _misfit: str | None  # why a pass could not be recorded
    _passing = False  # whether the recorder makes passes of its own now

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
        if names := split_inside(model):
            raise ValueError(
                f"model must have layers that are whole inside forward and backward, as under DDP "
                f"and FSDP2, but parameter {names[0]} is split by tensor parallelism: "
                f"{type(self).__name__} would record the curvature of a part"
            )
        self._ranks = GradientRanks(model, process_group)
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        self._spots = spots_of(model)
        self._sharded = any(map(is_sharded, self._names))
        self._open = False
        self._skipping = False
        self._handles: list[Any] = []
        self._scale = LossScale(self._ranks)
        self._begin()

    def _install(self) -> list[Any]:
        """Put hooks on the model; their handles are removed when the context is left."""
        return []

    def _verify(self) -> None:
        """Refuse parameters whose recordings are incomplete, with a warning."""
        return  # without hooks they are complete

    def _before_backward(self, loss: Tensor, outputs: Tensor | None) -> None:
        """The passes that `backward` makes in addition to the ordinary one."""
        return  # none by default

    def _reduce(self) -> None:
        """Sum up what several ranks recorded; called once, between recording and use."""
        self._ranks.sum_([self._sum_of(p) for p in self._names if p.requires_grad])

    def _check_terms(self, batch_size: int) -> None:
        """Raise RuntimeError where the loss seen by `backward` contradicts `batch_size`."""
        if self.loss is not None:
            self._scale.check(batch_size)

    @abstractmethod
    def _describe(self, p: Tensor) -> str:
        """What curvature `p` gets, for `summary()`."""

    @abstractmethod
    def of(self, p: Tensor, *, batch_size: int) -> ParameterCurvature | None:
        """H of the loss by `p`; see :class:`rootfree.Curvature`."""

    def __enter__(self) -> Self:
        if self._open or self._skipping:
            raise RuntimeError(f"{type(self).__name__} is entered already")
        if replaced := self._replaced():
            raise RuntimeError(replaced)
        self._begin()
        self._divisor = self._ranks.divisor
        self._looks = [(p.shape, p.device) for p in self._names]
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
        self._begin()
        self._skipping = True
        try:
            yield self
        finally:
            self._skipping = False

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
        self._scale.see(
            LOSSES[self.loss], outputs.detach(), gradients, loss.detach(), self._scale_of(loss)
        )

    def _scale_of(self, like: Tensor) -> Tensor | float:
        """The factor by which the gradient scaler has multiplied the loss."""
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
        """The sum that is recorded for `p`, zero at first."""
        if p not in self._records:
            shape, dtype = (*self._rows, *p.shape), wide_dtype(p.dtype)
            self._records[p] = torch.zeros(shape, dtype=dtype, device=p.device)
        total: Tensor = self._records[p]
        return total

    def joint(self) -> Sequence[tuple[Tensor, Tensor]]:
        """Pairs (weight, bias) that are one matrix; see :class:`rootfree.Curvature`."""
        return ()

    def check(self, params: Sequence[Tensor]) -> None:
        """Raise RuntimeError when there is nothing recorded that fits these parameters."""
        problem, together = self._problem(params), self._size > 1 and not self._reduced
        if together:  # a rank that raised alone would leave the others waiting
            problem = self._ranks.first(problem)
        if problem is not None:
            raise RuntimeError(problem)
        if not self._reduced:
            self._verify()
        if together:
            self._scale.reduce()
            self._reduce()
        self._reduced = True

    def _problem(self, params: Sequence[Tensor]) -> str | None:
        """Why the recordings cannot be used for these parameters; None: they can."""
        name = type(self).__name__
        if not self._records:
            why = (
                "Hooks do not reach into a model compiled by torch.compile: record the model it "
                "was made from"
            )
            if self._used:
                why = (
                    "A step uses up what was recorded: for two optimizers make two recorders, and "
                    "enter both, `with first, second:`"
                )
            return self._misfit or (
                f"{name} has recorded no backward pass since the last step: run forward and "
                f"backward inside `with recorder:`{self._hint}. {why}"
            )
        if replaced := self._replaced():
            return replaced
        for (p, path), (shape, device) in zip(self._names.items(), self._looks, strict=True):
            if p.shape != shape or p.device != device:
                return (
                    f"parameter {path} was {tuple(shape)} on {device} when the {name} recorded and "
                    f"is {tuple(p.shape)} on {p.device} now: run forward and backward again"
                )
        if not any(p in self._names for p in params):
            return f"none of the optimizer's parameters belongs to the {name}'s model"
        return None

    def used(self) -> None:
        """Drop what was recorded: the optimizer calls it at the end of a step that used it."""
        self._drop()
        self._used = True

    def _begin(self) -> None:
        """Begin a new context, whether it records or not."""
        self._drop()
        self._scale.clear()
        self._ranks.meet()
        self._size = self._ranks.size

    def _drop(self) -> None:
        self._records = {}
        self._context = object()
        self._reduced = self._used = False
        self._n = self._misfit = None

    def _replaced(self) -> str | None:
        """A message that names a parameter of the model that was replaced; None: none was."""
        if all(place.get(name) is found for place, name, found in self._spots):
            return None
        name = replaced_in(self.model, self._names)
        if name is None:
            return None
        return (
            f"parameter {name} of the model was replaced since the {type(self).__name__} was made: "
            "make a new one, and a new optimizer"
        )

    def _leaves(self, params: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that autograd differentiates by: the whole ones of sharded parameters."""
        whole = unsharded(self.model) if self._sharded else {}
        return [whole.get(id(p), p) for p in params]

    def summary(self) -> str:
        """A table: parameter, shape, curvature."""
        rows = [("parameter", "shape", "curvature")]
        for p, name in self._names.items():
            shape = "x".join(map(str, p.shape)) or "scalar"
            rows.append((name, shape, self._describe(p) if p.requires_grad else "frozen"))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)
