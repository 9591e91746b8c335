"""State of parameters: where it is, in which form, and how a checkpoint gets into it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from rootfree.checkpoint import StateMismatchError, match_state_dict
from rootfree.gradients import KnownList

Group = dict[str, Any]


class StatefulOptimizer(Optimizer, ABC):
    """The part of an optimizer that keeps its state.

    State is made when parameters are added, not at the first step, and is flat: `state[p]` maps
    strings to tensors, groups hold plain values. That is what lets `torch.load` with its safe
    default, distributed checkpoints and sharded training take it as it is.
    """

    _epoch = 0  #: how often state tensors were replaced

    # -- what a method defines ---------------------------------------------------------------

    @abstractmethod
    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """The state of parameter `p`: flat, tensors only."""

    @abstractmethod
    def _checked_options(self, group: Group) -> dict[str, Any]:
        """The values of the method's options in a group, or an error that names one."""

    def _converted(
        self, state: Mapping[str, Tensor], other: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """A state in the form of another: a method may keep the same numbers in several."""
        return state

    # -- looking it up, and where it is ------------------------------------------------------

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


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in state.items()}
