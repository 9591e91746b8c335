"""How much a rank sent and received, and how long it waited."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Totals since the optimizer was made; bytes by what was sent."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    waited: float = 0.0  # seconds that the host waited for rounds to arrive

    def count(self, what: str, *, sent: int, received: int) -> None:
        """One more round.  Changes this."""
        self.sent[what] += sent
        self.received[what] += received
        self.rounds += 1

    def described(self, steps: int) -> str:
        """The averages of a step, in words."""
        if self.rounds == 0:
            return "nothing was exchanged yet"
        kinds = ", ".join(f"{what} {total // steps:,}" for what, total in self.sent.items())
        received = sum(self.received.values()) // steps
        return (
            f"bytes sent in a step: {kinds}; received: {received:,}; in {self.rounds / steps:.3g} "
            f"rounds, of which the host waited {1e3 * self.waited / steps:.2f} ms"
        )
