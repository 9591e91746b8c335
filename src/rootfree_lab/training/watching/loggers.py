"""How a run is doing: warnings, and logs for TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

from rootfree import Diagnostics, RootFreeOptimizer
from rootfree_lab.config.needed import check_packages
from rootfree_lab.config.settings import OutputConfig
from rootfree_lab.files.checkpoints import file_name
from rootfree_lab.training.session import Point, Session
from rootfree_lab.training.watching.progress import Watcher


def loggers(output: OutputConfig, out: Path) -> list[Watcher]:
    """Those that a config asks for, and the one that warns."""
    check_packages(output)
    diagnosis = Diagnosis()
    made: list[Watcher] = [diagnosis]
    if output.tensorboard:
        made.append(TensorBoard(out / "tensorboard", diagnosis))
    if output.wandb is not None:
        made.append(WeightsAndBiases(output.wandb, out))
    return made


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
            place = f"{session.config.title}, step {session.done}"
            warnings.warn(f"{place}: {messages[0]}{more}", stacklevel=2)

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


class TensorBoard(Watcher):
    """Scalars for TensorBoard, one folder a run: the curve, and how the optimizer is doing."""

    def __init__(self, folder: Path, diagnosis: Diagnosis) -> None:
        self._folder, self._diagnosis = folder, diagnosis
        self._make: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = None

    def begin(self, session: Session) -> None:
        folder = self._folder / file_name(session.config)
        # What an interrupted run logged after its checkpoint is dropped.
        self._writer = self._make(str(folder), purge_step=session.done)

    def point(self, session: Session, point: Point) -> None:
        figures = {k: v for k, v in point.items() if k != "step"} | self._diagnosis.figures()
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, session.done)
        self._writer.flush()

    def end(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(Watcher):
    """A run of a project of Weights & Biases; a resumed run goes on in its own."""

    def __init__(self, project: str, folder: Path) -> None:
        self._project, self._folder = project, folder
        self._wandb: Any = importlib.import_module("wandb")
        self._run: Any = None

    def begin(self, session: Session) -> None:
        config = session.config
        self._run = self._wandb.init(
            project=self._project, name=file_name(config), id=config.identity(), resume="allow",
            config=config.as_table(), dir=str(self._folder), reinit=True,
        )  # fmt: skip

    def point(self, session: Session, point: Point) -> None:
        figures = {k: v for k, v in point.items() if v is not None and k != "step"}
        self._run.log(figures, step=session.done)

    def end(self) -> None:
        if self._run is not None:
            self._run.finish()
