"""The interface of a method: an optimizer, or the AdamW of its companion groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from rootfree.shell.checks import Check
from rootfree.shell.inspection import Factor
from rootfree.shell.work import Group, GroupMemory, Work


class Method(ABC):
    """Updates the parameters of a group, and describes their preconditioners."""

    #: option name -> check; the keys are exactly the hyper-parameters of the method
    options: ClassVar[Mapping[str, Check]] = {}

    def _checked_options(self, group: Group) -> dict[str, Any]:
        """The checked options of a group, as they are stored."""
        return {name: check(name, group[name]) for name, check in self.options.items()}

    @abstractmethod
    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """The state of parameter `p`: flat, tensors only, the same on every machine."""

    @abstractmethod
    def _update(self, work: Work) -> None:
        """Update parameters of one device and dtype, given their gradients."""

    def _send_numbers(self, work: Work) -> None:
        """Copy the hyper-parameters to where kernels read them, if there are kernels."""
        return

    def _reads_numbers(self, work: Work) -> bool:
        """Whether kernels read hyper-parameters on the device: recorded steps then follow them."""
        return False

    def _lay_out(self, memory: GroupMemory) -> None:
        """Prepare the memory of a group, given its complete state."""
        return

    @abstractmethod
    def _describe(self, p: Tensor, group: Group) -> str:
        """The preconditioner of `p` in words, for `summary()`."""

    @abstractmethod
    def _factors(self, p: Tensor, group: Group, row: Mapping[str, Tensor]) -> list[Factor]:
        """The factors of the preconditioner of `p`, given its state on this rank."""

    @abstractmethod
    def _update_rms(self, p: Tensor, group: Group, row: Mapping[str, Tensor]) -> Tensor | None:
        """The root mean square of the last step of `p`; None: it is not known."""
