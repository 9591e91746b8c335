"""The shell that every optimizer of the library shares: groups, validation, the step.

A method adds three things: the options it takes, the state of one parameter, and the update of a
list of parameters. Everything a training loop touches (schedulers, scalers, hooks) lives here,
once, and in state.py what keeps state and checkpoints.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import ParamsT

from rootfree import kernels
from rootfree.curvature import Curvature, CurvatureSource
from rootfree.gradients import WorkLists
from rootfree.groups import as_list, check_devices, check_option_names, check_parameters
from rootfree.options import Check, positive_integer
from rootfree.state import StatefulOptimizer
from rootfree.summary import named_groups, table_of

Group = dict[str, Any]

_BATCH_SIZE_MISSING = (
    "batch_size is not set. It is the number of loss terms that the loss averages: images of a "
    "classification batch, tokens of a language model, over all micro-batches and ranks; 1 for a "
    "summed loss. Give batch_size=..., set optimizer.batch_size before step(), or count it with "
    "rootfree.track_batch_size(model, optimizer)."
)


class RootFreeOptimizer(StatefulOptimizer):
    """Base of the optimizers: subclasses define `options`, `_init_state` and `_update`."""

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

    # -- what a person sees ------------------------------------------------------------------

    def summary(self) -> str:
        """A table: parameter, shape, preconditioner, bytes of state."""
        described = (
            (name, p, self._describe(p, group), self.state[p])
            for group, names in named_groups(self.param_groups)
            for name, p in zip(names, group["params"], strict=True)
        )
        return table_of(described)
