"""The shell that every optimizer of the library shares: groups, validation, state, the step.

A method adds three things: the options it takes, the state of one parameter, and the update of a
list of parameters. Everything a training loop touches (schedulers, scalers, hooks, checkpoints)
lives here, once.

State is created when parameters are added, not at the first step, and is flat: `state[p]` maps
strings to tensors, and groups hold plain values. So `torch.load` with its safe default, distributed
checkpoints and sharded training work without conversion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rootfree.curvature import CurvatureSource
from rootfree.kernels.plan import kernel_devices
from rootfree.layout.joint import JointPairs
from rootfree.placement.owners import Cut
from rootfree.placement.sharded import Sharded, check_placement, claimed_placement
from rootfree.rules.momentum import Tail
from rootfree.shell import batch_size_option
from rootfree.shell.checkpoint import load_checkpoint, with_named_dtypes
from rootfree.shell.companion import AdamW
from rootfree.shell.diagnostics import Diagnostics
from rootfree.shell.gradients import Watch, advance_clocks, find_work, memory_of
from rootfree.shell.groups import checked_group, refuse_model
from rootfree.shell.inspection import last_update_rms, measured_parameters
from rootfree.shell.memory import check_shapes, remember
from rootfree.shell.method import Method
from rootfree.shell.options import check_switches
from rootfree.shell.placing import Placing
from rootfree.shell.summary import table_of
from rootfree.shell.work import Group, GroupMemory, Work
from rootfree.shell.wrappers import Wrappers

_SWITCHES = ("nesterov", "decoupled_weight_decay")
_TAIL = ("lr", "momentum", "weight_decay", *_SWITCHES, "update_rms", "max_update_rms", "max_update")


class RootFreeOptimizer(Optimizer, Method):
    """Base of the optimizers: subclasses define what a `Method` has."""

    #: whether groups may be left to AdamW with `companion="adamw"`
    _has_companions: ClassVar[bool] = False

    #: how many elements are updated at once on a CPU, so that they stay in the cache between
    #: passes (twice as fast as all at once on a ViT-B); None: all
    _elements_at_once: ClassVar[int | None] = 2**20

    #: set by `rootfree.track_batch_size`: gives B after the closure, is reset by `zero_grad`
    _batch_counter: Any = None

    #: whether this step, if it is being recorded, is replayed by a `GraphedStep`
    _replayed_here = False

    #: wrappers that call `step` of this optimizer; None: not looked for yet
    _wrappers: Wrappers | None = None

    #: what is remembered between steps, by id of the group; copies start without
    _memories: Mapping[int, GroupMemory] = {}

    _fused: bool | None = None  #: the argument `fused`
    _capturable = False  #: whether lr is kept as a tensor on the device
    _curvature: CurvatureSource | None = None  #: where H comes from; None: it is B·ggᵀ
    _pairs = JointPairs()  #: weights and biases that the curvature treats as one matrix
    _placement: Sharded | None = None  #: the argument `placement`, in methods that have it

    def __init__(self, params: ParamsT, given: Mapping[str, Any]) -> None:
        """`given`: the arguments of the method's constructor, by name."""
        refuse_model(params)
        if isinstance(params, Iterator):
            params = list(params)
        self._placement = claimed_placement(given)
        self._placing = Placing(self._placement)
        with self._placing.agreement.telling(params):
            check_placement(given)
            kernel_devices(given["fused"])  # refuses an invalid value
            check_switches(given)
            self._fused, self._capturable = given["fused"], given["capturable"]
            self._watch = Watch(given["nonfinite"], fused=given["fused"])
            if given["curvature"] is not None:
                self._curvature = CurvatureSource(given["curvature"])
                self._pairs = self._curvature.pairs
            # The method's name travels in the checkpoint, so that another method's is refused.
            options = {name: given[name] for name in self.options}
            super().__init__(params, {**options, "method": type(self).__name__})
            check_shapes(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # This machine may have no kernels to insist on.
        self._fused = False if state.get("_fused") is False else None
        self._placing = Placing(self._placement)  # ranks find each other anew
        self._watch = Watch(self.__dict__.pop("nonfinite", "skip"), fused=self._fused)
        if self._curvature is not None:
            self._pairs = self._curvature.pairs
        later = {**dict.fromkeys((*_SWITCHES, "maximize"), False), "fast_start": True}
        for group in self.param_groups:  # pickled before these options existed
            for name in later.keys() & self._of(group).options.keys():
                group.setdefault(name, later[name])
        for name in later.keys() & self.options.keys():
            self.defaults.setdefault(name, later[name])

    def __getstate__(self) -> dict[str, Any]:
        # A copy without its curvature would be another method.
        kept = {} if self._curvature is None else {"_curvature": self._curvature}
        asked = {name: getattr(self, name) for name in ("_fused", "_capturable", "_placement")}
        return {**super().__getstate__(), **asked, **kept, "nonfinite": self._watch.mode}

    def _of(self, group: Group) -> Method:
        """What updates the parameters of a group: this method, or its companion."""
        return self if group.get("companion") is None else AdamW(fused=self._fused is not False)

    def _cuts(self, params: Sequence[Tensor], group: Group) -> list[Cut] | None:
        """How parameters are cut into blocks that ranks may share; None: there are no blocks."""
        return None

    @_disable_dynamo
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own options; a bad group changes nothing."""
        if isinstance(param_group, dict) and isinstance(param_group.get("params"), Iterator):
            param_group = {**param_group, "params": list(param_group["params"])}
        with self._placing.agreement.telling(param_group):
            group = checked_group(self, param_group)
            self._placing.settle(self, group)
        super().add_param_group(group)
        method = self._of(group)
        for name in {*self.options} - {*method.options}:  # torch filled them in
            del group[name]
        for p in group["params"]:
            self.state[p] = method._init_state(p, group)
            self._watch.count_on(p.device)

    def _checked_options(self, group: Group) -> dict[str, Any]:
        checked = super()._checked_options(group)
        if checked["maximize"] and self._curvature is not None:
            raise ValueError(
                "maximize must be False where a curvature is given, got True: it is the curvature "
                "of a loss that is minimised. Turn the sign of the loss"
            )
        return checked

    def _terms(self, group: Group) -> Any:
        """B; 1 in methods and groups without it."""
        return group.get("batch_size", 1)

    @property
    def batch_size(self) -> int | None:
        """B, the number of averaged loss terms; setting it sets it in every group that has it."""
        return batch_size_option.common_value(self)

    @batch_size.setter
    def batch_size(self, value: int) -> None:
        batch_size_option.set_in_groups(self, value)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every parameter that has a gradient.

        All gradients, and a given curvature, are checked before the first parameter changes. An
        error leaves parameters and state as they were.
        """
        if torch.compiler.is_compiling() and self._placing.agreement.is_shared:
            return self._plain_step(closure)  # ranks first compare what they do, on the host
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work, curvature = find_work(self), self._curvature
        if curvature is not None:
            curvature.check([p for w in work if w.refresh for p in w.params])
        if self._batch_counter is not None:
            batch_size_option.count(self)
        elif self._wrappers != () and not torch.compiler.is_compiling():
            batch_size_option.ask_wrappers(self)
        if any(self._terms(w.group) is None for w in work):
            raise RuntimeError(batch_size_option.MISSING)
        given = [] if curvature is None else self._asked(curvature, work)
        acts = self._watch.look(work, self.param_groups, given)
        for w in work:
            if acts:
                self._act(w)
            w.gs = []
        if acts:
            advance_clocks(self, work)
        if curvature is not None:
            curvature.done()
        return loss

    def _asked(self, curvature: CurvatureSource, work: list[Work]) -> list[Any]:
        """Ask for H where preconditioners are refreshed; returns its largest numbers to check."""
        refreshed = [w for w in work if w.refresh]
        for w in refreshed:
            w.matrices = w.matrices or curvature.matrices_of(w.params)
        asked = ((*each, self._terms(w.group)) for w in refreshed for each in w.matrices)
        curvature.ask(asked, self._placing.blocks_here)
        return curvature.largest

    @_disable_dynamo
    def _plain_step(self, closure: Any = None) -> Any:
        """The step outside of compiled graphs."""
        return RootFreeOptimizer.step(self, closure)

    def _act(self, work: Work) -> None:
        """Update the work's parameters; `maximize` turns the sign of the gradients."""
        if work.group["maximize"]:
            work.gs = list(torch._foreach_neg(work.gs))
        self._of(work.group)._update(work)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped since the optimizer was made; reading waits for the device.

        Steps that a gradient scaler skips are not counted: they never reach the optimizer.
        """
        return self._watch.skipped

    _remember = _disable_dynamo(remember)  # in memory.py
    _update_rms = last_update_rms  # in inspection.py

    def _settings(self, group: Group, i: int, *, ago: int = 0) -> Group:
        """The hyper-parameters of a step of parameter i of a group; at a start some differ.

        The step is the next one, or one that was so many steps `ago`.
        """
        return group

    def _apart(self, memory: GroupMemory) -> Sequence[Any] | None:
        """For each parameter, what must be alike in those that are updated together."""
        return None

    def _tail(self, group: Group) -> Tail:
        """The tail of the heavy-ball methods."""
        return Tail(*[group.get(name) for name in _TAIL])  # type: ignore[arg-type]

    def _why_not_recordable(self) -> str | None:
        """Why a step cannot be recorded in a CUDA graph; None: it can."""
        return "its ranks exchange blocks" if self._placing.homes else None

    def release(self) -> None:
        """Drop recorded CUDA graphs, as before a process group ends; they are recorded anew."""
        for memory in self._memories.values():
            for work in (work for _, works in memory.patterns for work in works):
                for _, stack in work.stacks or []:
                    stack.release()

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the count of the batch size where it is tracked."""
        super().zero_grad(set_to_none)
        if self._batch_counter is not None:
            self._batch_counter.reset()

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The checkpoint, as in torch.optim."""
        for group in self.param_groups:  # parameters may have been replaced
            memory_of(self, group)
        saved = super().state_dict()
        return {**saved, "param_groups": [*map(with_named_dtypes, saved["param_groups"])]}

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a checkpoint in; each state tensor keeps its own dtype, device and storage.

        As in torch.optim the checkpoint's hyper-parameters win. A checkpoint that does not fit
        (another method, other shapes) is refused before anything is changed.
        """
        if isinstance(state_dict, Mapping):  # anything else is refused with the other ranks
            state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        load_checkpoint(self, state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def summary(self) -> str:
        """A table: parameter, shape, role (if groups say it), preconditioner, bytes of state.

        Where ranks have parts of the state, "bytes here" is what this one has of it. Where they
        share blocks, a line says what is exchanged.
        """
        return "\n".join([table_of(self), *self._placing.report()])

    @torch.no_grad()
    def diagnostics(self, *, conditions: bool = True) -> Diagnostics:
        """Norms, conditions of the factors and sizes of the steps, for every parameter.

        Nothing waits for the device until the result is read, printed or asked for warnings.
        Ask after ``step()`` and before ``zero_grad()``: without the gradient Nesterov's momentum
        itself stands for the step, and a step without momentum is not known. Conditions take one
        inverse of each factor: ask between epochs, not in every step.

        Args:
            conditions: whether to estimate condition numbers.
        """
        found = measured_parameters(self, conditions=conditions)
        return Diagnostics(found, self._watch.counts())

    def _direction_of(self, p: Tensor, group: Group, row: Mapping[str, Tensor]) -> Tensor | None:
        """The preconditioned gradient of `p`, before any limit; None: not available."""
        return None


def states(work: Work, key: str, where: list[int] | None = None) -> list[Tensor]:
    """One entry of the state of each parameter (or of some); empty if they lack it."""
    rows = work.rows if where is None else [work.rows[i] for i in where]
    return [row[key] for row in rows] if key in rows[0] else []
