"""Logs of a run for other programs: TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rootfree_lab.config.needed import check_packages
from rootfree_lab.config.settings import OutputConfig
from rootfree_lab.files.checkpoints import file_name
from rootfree_lab.training.session import Point, Session
from rootfree_lab.training.watching.diagnosis import Diagnosis
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


class TensorBoard(Watcher):
    """Scalars for TensorBoard, one folder a run: the curve, and how the optimizer is doing."""

    def __init__(self, folder: Path, diagnosis: Diagnosis) -> None:
        self._folder, self._diagnosis = folder, diagnosis
        self._make: Any = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = None

    def begin(self, session: Session) -> None:
        config = session.config
        name = file_name(config)
        # What an interrupted run logged after its checkpoint is dropped.
        self._writer = self._make(str(self._folder / name), purge_step=session.done)

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
