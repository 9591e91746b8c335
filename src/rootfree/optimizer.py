"""The shell that every optimizer of the library shares: groups, validation, state, the step.

A method adds three things: the options it takes, the state of one parameter, and the update of a
list of parameters. Everything a training loop touches (schedulers, scalers, hooks, checkpoints)
lives here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rootfree import kernels
from rootfree.checkpoint import StateMismatchError, match_state_dict
from rootfree.curvature import Curvature, CurvatureSource
from rootfree.gradients import KnownList, WorkLists
from rootfree.groups import as_list, check_devices, check_option_names, check_parameters
from rootfree.options import Check, positive_integer
from rootfree.summary import named_groups, table_of

Group = dict[str, Any]

_BATCH_SIZE_MISSING = (
    "batch_size is not set. It is the number of loss terms that the loss averages: images of a "
    "classification batch, tokens of a language model, over all micro-batches and ranks; 1 for a "
    "summed loss. Give batch_size=..., set optimizer.batch_size before step(), or count it with "
    "rootfree.track_batch_size(model, optimizer)."
)


class RootFreeOptimizer(Optimizer, ABC):
    """Base of the optimizers: subclasses define `options`, `_init_state` and `_update`.

    State is made when parameters are added, not at the first step, and is flat: `state[p]` maps
    strings to tensors, groups hold plain values. That is what lets `torch.load` with its safe
    default, distributed checkpoints and sharded training take it as it is.
    """

    #: option name -> check; the keys are exactly the hyper-parameters of the method
    options: ClassVar[Mapping[str, Check]] = {}

    #: how many elements are updated at once on a CPU, so that they stay in its cache between the
    #: passes over them (twice as fast as all at once on a ViT-B); None: all
    _elements_at_once: ClassVar[int | None] = 2**20

    #: set by `rootfree.track_batch_size`: asked for B after the closure, told when B starts anew
    _batch_counter: Any = None

    #: the method's entry in `kernels.TABLE`
    _kernel_name: ClassVar[str] = ""

    #: what is remembered between steps; made when first needed, so that copies start without
    _work_lists: WorkLists | None = None
    _epoch = 0  #: how often state tensors were replaced

    _fused: bool | None = None  #: whether kernels were asked for
    _capturable = False  #: whether lr is kept as a tensor on the device
    _curvature: CurvatureSource | None = None  #: where H comes from; None: it is B·ggᵀ

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        curvature: Curvature | None = None,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        self._fused = fused
        self._kernels = kernels.choose(self._kernel_name, fused)
        self._capturable = capturable
        if curvature is not None:
            self._curvature = CurvatureSource(curvature)
        # The method's name travels in the checkpoint, so that another method's is refused.
        super().__init__(params, {**defaults, "method": type(self).__name__})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The kernels of the machine that we are on now: it may have none to insist on.
        self._fused = False if state.get("_fused") is False else None
        self._kernels = kernels.choose(self._kernel_name, self._fused)

    # -- what a method defines ---------------------------------------------------------------

    @abstractmethod
    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """The state of parameter `p`: flat, tensors only."""

    @abstractmethod
    def _update(self, group: Group, ps: list[Tensor], gs: list[Tensor]) -> None:
        """Update parameters of one device and dtype, given their gradients."""

    def _refreshes(self, group: Group) -> bool:
        return True  # whether the coming step updates the preconditioners of this group

    @abstractmethod
    def _describe(self, p: Tensor, group: Group) -> str:
        """What preconditioner `p` got, for `summary()`."""

    # -- groups ------------------------------------------------------------------------------

    @_disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; a bad group changes nothing."""
        group = self._checked_group(param_group)
        if self._capturable and not isinstance(group["lr"], Tensor):
            first = next((p for p in group["params"]), None)
            p = first[1] if isinstance(first, tuple) else first
            group["lr"] = torch.tensor(group["lr"], device=None if p is None else p.device)
        super().add_param_group(group)
        for p in self.param_groups[-1]["params"]:
            self.state[p] = self._init_state(p, group)

    def _checked_group(self, param_group: dict[str, Any]) -> Group:
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        group = {**self.defaults, **param_group}
        group["params"] = as_list(param_group["params"])
        known = {id(p) for group in self.param_groups for p in group["params"]}
        check_parameters(group["params"], known)
        if self._fused:
            check_devices(group["params"], self._kernels)
        if self._curvature is not None:
            self._curvature.check_group(group["params"])
        check_option_names(param_group, self.options, method=type(self).__name__)
        return {**group, **self._checked_options(group)}

    def _checked_options(self, group: Group) -> dict[str, Any]:
        return {name: check(name, group[name]) for name, check in self.options.items()}

    @property
    def batch_size(self) -> int | None:
        """B, the number of averaged loss terms; setting it sets it in every group."""
        values = {group["batch_size"] for group in self.param_groups}
        if len(values) != 1:
            raise ValueError(
                f"the groups have different values of batch_size, {sorted(values, key=str)}: "
                "read it from param_groups"
            )
        (value,) = values
        return cast("int | None", value)

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        checked = positive_integer("batch_size", value)
        for group in self.param_groups:
            group["batch_size"] = checked

    # -- the step ----------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient.

        All gradients are looked at before the first parameter is changed, so that an error leaves
        parameters and state as they were.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self._work()
        if self._curvature is not None:
            self._curvature.check([(group, ps) for group, ps, _ in work], self._refreshes)
        if self._batch_counter is not None:
            self._count_batch()
        if any(group["batch_size"] is None for group, _, _ in work):
            raise RuntimeError(_BATCH_SIZE_MISSING)
        if self._curvature is not None:
            self._curvature.ask()
        for group, ps, gs in work:
            if self._is_elsewhere(ps):
                self._settle(group)
            self._update(group, ps, gs)
        self._end_step()
        if self._curvature is not None:
            self._curvature.done()
        return loss

    def _work(self) -> list[tuple[Group, list[Tensor], list[Tensor]]]:
        """What there is to update: groups, parameters, and gradients that were found usable."""
        if self._work_lists is None:
            self._work_lists = WorkLists(self._elements_at_once)
        lists = self._work_lists
        return [(group, ps, gs) for group in self.param_groups for ps, gs in lists.of(group)]

    def _end_step(self) -> None:
        """Called when all parameters are updated."""

    def _kernel_for(self, p: Tensor) -> Any:
        """The kernel for the device of p; None: the rule runs.

        The rule is what gets compiled, what knows other curvature than B·ggᵀ, and what can be
        followed where tensors have no numbers (to estimate memory, say).
        """
        if self._curvature is not None or torch.compiler.is_compiling():
            return None
        if isinstance(p, FakeTensor):
            return None
        kernel = self._kernels.get(p.device.type)
        # Those who insist see the error itself.
        return kernel if kernel is None or self._fused or kernels.usable(p.device) else None

    def _run_kernel(self, group: Group, ps: list[Tensor], gs: list[Tensor], **rates: float) -> bool:
        """Update by the diagonal methods' kernel; False, with nothing done, where it cannot."""
        kernel = self._kernel_for(ps[0])
        return kernel is not None and kernel(
            ps,
            gs,
            self._states(ps, "preconditioner"),
            self._states(ps, "momentum"),
            self._states(ps, "rounding"),
            lr=group["lr"],
            lam=group["damping"],
            kappa=group["weight_decay"],
            **rates,
        )

    def _states(self, ps: list[Tensor], key: str) -> list[Tensor]:
        """One entry of the state of each parameter; empty where they have none."""
        rows = self._rows(ps)
        return [row[key] for row in rows] if key in rows[0] else []

    def _rows(self, ps: list[Tensor]) -> list[dict[str, Tensor]]:
        """`state[p]` of each parameter; looked up once for lists that live on (`WorkLists`)."""
        if not isinstance(ps, KnownList):
            return [self.state[p] for p in ps]
        known = ps.known.get("rows")
        if known is None or known[0] != self._epoch:
            known = ps.known["rows"] = (self._epoch, [self.state[p] for p in ps])
        rows: list[dict[str, Tensor]] = known[1]
        return rows

    def _is_elsewhere(self, ps: list[Tensor]) -> bool:
        """Whether state of these is not where they are.

        All of it is looked at once for a list that lives on, afterwards the first parameter's.
        """
        rows, device = self._rows(ps), ps[0].device
        fresh = isinstance(ps, KnownList) and ps.known.get("here") != self._epoch
        if any(t.device != device for row in (rows if fresh else rows[:1]) for t in row.values()):
            return True
        if isinstance(ps, KnownList):
            ps.known["here"] = self._epoch
        return False

    @_disable_dynamo
    def _settle(self, group: Group) -> None:
        """State goes where its parameter is, in the form that the group's options ask for.

        The model was moved after the optimizer was made, or a checkpoint brought other options.
        Parameters without a gradient in this step are among them: others are stacked with them.
        """
        for p in group["params"]:
            moved = {key: t.to(p.device) for key, t in self.state[p].items()}
            self.state[p] = dict(self._converted(moved, self._init_state(p, group)))
        self._epoch += 1

    @_disable_dynamo
    def _count_batch(self) -> None:
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            self.batch_size = self._batch_counter.take()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients (and, where the batch size is counted, what was counted)."""
        super().zero_grad(set_to_none)
        if self._batch_counter is not None:
            self._batch_counter.reset()

    def __getstate__(self) -> dict[str, Any]:
        # A copy without its curvature would be another method.
        kept = {} if self._curvature is None else {"_curvature": self._curvature}
        asked = {"_fused": self._fused, "_capturable": self._capturable}
        return {**super().__getstate__(), **asked, **kept}

    # -- checkpoints -------------------------------------------------------------------------

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a checkpoint in; each state tensor keeps its own dtype, device and storage.

        As in torch.optim the checkpoint's hyper-parameters win. A checkpoint that does not fit
        (another method, other shapes) is refused before anything is changed.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        pairs = match_state_dict(self.param_groups, state_dict, method=type(self).__name__)
        plan = []
        for group, saved_group, saved_states in pairs:
            values = {**group, **saved_group}
            values.update(self._checked_options(values))
            for p, saved in zip(group["params"], saved_states, strict=True):
                if saved is not None:
                    plan.append((p, self._fitting_state(p, values, saved), saved))
        for p, mine, saved in plan:
            fitting = self._converted(saved, mine)
            for key, tensor in mine.items():
                tensor.copy_(fitting[key])
            if mine is not self.state[p]:
                self.state[p] = mine
                self._epoch += 1
        for group, saved_group, _ in pairs:
            lr = group["lr"]
            group.update(saved_group)
            if isinstance(lr, Tensor):  # captured graphs and schedulers hold this very tensor
                group["lr"] = lr.copy_(torch.as_tensor(saved_group["lr"]))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _fitting_state(self, p: Tensor, values: Group, saved: Mapping[str, Tensor]) -> Any:
        """State tensors of p that `saved` can be copied into: the ones in use where they fit."""
        if _shapes(self.state[p]) == _shapes(self._converted(saved, self.state[p])):
            return self.state[p]
        mine = self._init_state(p, values)  # the checkpoint's options may differ from ours
        if _shapes(mine) == _shapes(self._converted(saved, mine)):
            return mine
        raise StateMismatchError(
            f"the checkpoint's state {_shapes(saved)} does not fit a parameter of shape "
            f"{tuple(p.shape)}, which needs {_shapes(mine)}"
        )

    def _converted(
        self, state: Mapping[str, Tensor], other: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """A state in the form of another: a method may keep the same numbers in several."""
        return state

    # -- what a person sees ------------------------------------------------------------------

    def summary(self) -> str:
        """A table: parameter, shape, preconditioner, bytes of state."""
        described = (
            (name, p, self._describe(p, group), self.state[p])
            for group, names in named_groups(self.param_groups)
            for name, p in zip(names, group["params"], strict=True)
        )
        return table_of(described)


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}
