"""The paper's ablations of root-free methods: one ingredient left out, as a class of its own.

A class of its own has its own name in checkpoints and records, and stays ablated whatever the
training loop does. (The third ablation, a constant learning rate, is a schedule.)
"""

from __future__ import annotations

from typing import Any

from rootfree import RootFreeOptimizer


def without_batch_size(method: type[RootFreeOptimizer]) -> type[RootFreeOptimizer]:
    """The method with B = 1, whatever batch size it is told: the loss taken as it is scaled."""

    class NoB(method):  # type: ignore[misc, valid-type]
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group({**param_group, "batch_size": 1})

        @property
        def batch_size(self) -> int:
            return 1

        @batch_size.setter
        def batch_size(self, value: int) -> None:
            """Ignored: that is the ablation."""

    return _named(NoB, method, "NoB")


def zero_initialised(method: type[RootFreeOptimizer]) -> type[RootFreeOptimizer]:
    """The method with a preconditioner that starts at zero, as root-based methods do.

    For the methods that never invert what they start from: the diagonal ones, and RFFullAdagrad
    with damping. (Kronecker factors take each other's inverse in the first step.)
    """

    class ZeroInit(method):  # type: ignore[misc, valid-type]
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            if "safeguard" in self.options:  # it starts from one, whatever is there
                param_group = {**param_group, "safeguard": False}
            super().add_param_group(param_group)
            group = self.param_groups[-1]
            for p in group["params"] if group.get("companion") is None else ():
                state = self.state[p]
                kept = [key for key in state if key == "preconditioner" or key.endswith(".factor")]
                if not kept:
                    raise ValueError(
                        f"{method.__name__} cannot start at zero with damping 0: the inverse of "
                        "its preconditioner would not exist"
                    )
                for key in kept:
                    state[key].zero_()

    return _named(ZeroInit, method, "ZeroInit")


def _named(
    ablation: type[RootFreeOptimizer], method: type[RootFreeOptimizer], suffix: str
) -> type[RootFreeOptimizer]:
    ablation.__name__ = ablation.__qualname__ = f"{method.__name__}{suffix}"
    ablation.__doc__ = f"{method.__name__}, {suffix}; see `{__name__}`."
    # The signature is the method's: it is what the options are checked against.
    ablation.__init__ = method.__init__  # type: ignore[method-assign]
    return ablation
