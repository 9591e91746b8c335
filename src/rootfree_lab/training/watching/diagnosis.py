"""How the optimizers of a run are doing: looked at with every point of the curve."""

from __future__ import annotations

import warnings

from rootfree import Diagnostics, RootFreeOptimizer
from rootfree_lab.training.session import Point, Session
from rootfree_lab.training.watching.progress import Watcher


class Diagnosis(Watcher):
    """Warns, once in a run, when factors of the optimizer become ill-conditioned."""

    def __init__(self) -> None:
        self._found: list[Diagnostics] = []
        self._told = False

    def point(self, session: Session, point: Point) -> None:
        ours = [each for each in session.optimizers if isinstance(each, RootFreeOptimizer)]
        self._found = [optimizer.diagnostics() for optimizer in ours]
        messages = [text for found in self._found for text in found.warnings()]
        if messages and not self._told:
            self._told = True
            more = f" (and {len(messages) - 1} more)" if len(messages) > 1 else ""
            name = f"{session.config.label} seed {session.config.train.seed}"
            warnings.warn(f"{name}, step {session.done}: {messages[0]}{more}", stacklevel=2)

    def figures(self) -> dict[str, float | None]:
        """The numbers of the last point: what, then the name of the parameter."""
        figures: dict[str, float | None] = {}
        for found in self._found:
            figures["skipped_steps"] = found.skipped_steps
            for p in found.read():
                figures |= {
                    f"parameter_norm/{p.name}": p.parameter_norm,
                    f"momentum_norm/{p.name}": p.momentum_norm,
                    f"update_ratio/{p.name}": p.update_ratio,
                    f"condition/{p.name}": p.condition,
                }
        return figures
