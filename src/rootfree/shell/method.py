"""What the shell asks of a method: of an optimizer, or of AdamW beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from rootfree.shell.checks import Check
from rootfree.shell.inspection import Factor
from rootfree.shell.work import Group, GroupMemory, Work


class Method(ABC):
    """How the parameters of a group are updated, and what there is to say about that."""

    #: option name -> check; the keys are exactly the hyper-parameters of the method
    options: ClassVar[Mapping[str, Check]] = {}

    def _checked_options(self, group: Group) -> dict[str, Any]:
        """The options of a group as they are stored, or an error."""
        return {name: check(name, group[name]) for name, check in self.options.items()}

    @abstractmethod
    def _init_state(self, p: Tensor, group: Group) -> dict[str, Tensor]:
        """The state of parameter `p`: flat, tensors only, the same on every machine."""

    @abstractmethod
    def _update(self, work: Work) -> None:
        """Update parameters of one device and dtype, given their gradients."""

    def _send_numbers(self, work: Work) -> None:
        """Bring the hyper-parameters to where kernels read them."""
        return  # nothing, unless a method says otherwise

    def _reads_numbers(self, work: Work) -> bool:
        """Whether hyper-parameters are read from the device: a recorded step then follows them."""
        return False

    def _lay_out(self, memory: GroupMemory) -> None:
        """Prepare what is remembered of a group, given its complete state."""
        return  # nothing, unless a method says otherwise

    @abstractmethod
    def _describe(self, p: Tensor, group: Group) -> str:
        """What preconditioner `p` got, for `summary()`."""

    @abstractmethod
    def _factors(self, p: Tensor, group: Group, row: Mapping[str, Tensor]) -> list[Factor]:
        """What the preconditioner of `p` is made of, given its state on this rank."""

    @abstractmethod
    def _update_rms(self, p: Tensor, group: Group, row: Mapping[str, Tensor]) -> Tensor | None:
        """The root mean square of the last step of `p`; None: it is not known."""
