"""All tasks by name, and the config of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import as_file, files
from pathlib import Path

from rootfree_lab.bench.first_try.entrants import Entrant
from rootfree_lab.bench.first_try.records import Record
from rootfree_lab.config.files import load_config
from rootfree_lab.config.reading import check_names
from rootfree_lab.config.settings import Config, DataConfig, ScheduleConfig

SCALES = ("small", "full")
CONSTANT_STEPS = 1500
TASKS = (
    "mlp_digits", "cnn_bn_digits", "cnn_digits", "resnet_cifar10", "vgg_cifar10", "vit_cifar10",
    "gpt_sotu", "lstm_sotu", "gat_cora", "logistic_breast_cancer", "least_squares_diabetes",
    "lora_digits",
)  # fmt: skip
#: Tasks that were written after the defaults were chosen.
HELD_OUT = (
    "mlp_letter", "mlp_magic", "mlp_batch512_digits", "cnn_batch4_digits", "cnn_square_digits",
    "densenet_cifar10", "swin_cifar10", "gcvit_cifar10", "focalnet_cifar10", "vmamba_cifar10",
    "gamlp_cora", "logistic_letter", "logistic_spambase",
)  # fmt: skip
ALL = (*TASKS, *HELD_OUT)


@dataclass(frozen=True)
class Run:
    """A run to be made: its record before training, its optimizer, and where its data is."""

    record: Record
    entrant: Entrant
    data: Path | None = None

    @property
    def config(self) -> Config:
        """As the laboratory trains it: evaluated once, at the end."""
        record = self.record
        task = config_of(record.task, record.scale)
        autocast = "none" if record.device == "cpu" else task.train.autocast
        return replace(
            task,
            label=record.label,
            data=data_config(record.task, record.scale, self.data),
            optimizer=self.entrant.optimizer,
            schedule=ScheduleConfig() if record.constant else task.schedule,
            train=replace(
                task.train, steps=record.steps, eval_every=record.steps, seed=record.seed,
                device=record.device, autocast=autocast,
            ),
        )  # fmt: skip


@lru_cache(maxsize=2 * len(ALL))
def config_of(task: str, scale: str = "small") -> Config:
    """The config of a task, as its file has it."""
    with as_file(files("rootfree_lab.bench.first_try") / "tasks" / f"{task}.toml") as path:
        return load_config(path, entry=scale)


def is_convex(task: str) -> bool:
    """Whether a task has one minimum, and a constant learning rate."""
    return config_of(task).schedule.name == "constant"


def data_of(task: str) -> str | None:
    """The data of a task that a compact folder has, by its name in `data.FILES`."""
    module, _, name = config_of(task).data.name.partition(":")
    return name if module.endswith(".data") else None


def data_config(task: str, scale: str, folder: Path | None) -> DataConfig:
    """Where the data of a task is read: in the folder if that is for it, or else in the cache."""
    config = config_of(task, scale).data
    if folder is None or not (data_of(task) or (folder / f"{config.name}.dat").is_file()):
        return config
    return replace(config, folder=str(folder))


def chosen(names: Sequence[str], *, held_out: bool = False) -> list[str]:
    """The tasks of these names, a whole suite if there are none, in the order of the suite."""
    suite = HELD_OUT if held_out else TASKS
    check_names("--tasks: the task", names, suite)
    return [name for name in suite if not names or name in names]


def steps_of(task: str, scale: str, *, constant: bool, steps: int | None) -> int:
    """How many steps a run has."""
    return steps or (CONSTANT_STEPS if constant else config_of(task, scale).train.steps or 0)
