"""The settings of a training run, as a tree of frozen dataclasses read from TOML.

[data]       what to train on             [schedule]  the learning rate over time
[model]      what to train                [train]     length, batch, loss, seed, device
[optimizer]  name, and its own options    [output]    logs and checkpoints: no effect on results
[[compare]]  label, seeds and what differs from the above, for `rootfree compare`
[search]     budget and ranges of settings, for `rootfree search`
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rootfree_lab.config import own_code
from rootfree_lab.config.reading import Table, check_names

LOSSES = ("cross_entropy", "square")
SCHEDULES = ("constant", "cosine", "linear", "step")
AUTOCASTS = ("none", "bf16")
PARALLELS = ("none", "ddp", "fsdp2", "hsdp")
CROPS = ("padded", "resized")
# Settings that were added later. If they are off, they are left out of a run's identity, which
# then stays the same as before they existed.
_LATER = (
    ("train", "channels_last"), ("train", "rollback"), ("schedule", "warmup_share"),
    ("data", "random_windows"),
)  # fmt: skip


def one_of(name: str, value: str, allowed: tuple[str, ...], *, own: bool = False) -> None:
    """Raise if a value is neither allowed nor, with `own`, the name of a user's code."""
    if not (own and own_code.is_own(value)):
        check_names(f"the value of {name}", [value], allowed)


def at_least(low: float, **values: float | None) -> None:
    """Raise if a given value is lower."""
    for name, value in values.items():
        if value is not None and not value >= low:
            raise ValueError(f"{name} must be at least {low:g}, got {value!r}")


def in_unit_interval(**values: float) -> None:
    """Raise if a value is not in [0, 1]."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value!r}")


@dataclass(frozen=True)
class DataConfig:
    """The data set, or a user's own (see `own_code`).

    `folder` is where its files are, and `limit` takes only the first examples. `size` is the side
    in pixels to which images of a folder are scaled.

    With `augment`, images are mirrored and cropped at random. `crop = "padded"` crops from the
    image with a black margin; "resized" crops 8 to 100 % of the image and scales that to its size.
    `erase` is the probability that a random box of an image is filled with noise. The windows of a
    text are shifted together at random; with `random_windows` each one starts anywhere.
    """

    name: str
    folder: str | None = None
    limit: int | None = None
    size: int | None = None
    augment: bool = False
    crop: str = "padded"
    erase: float = 0.0
    random_windows: bool = False

    def __post_init__(self) -> None:
        at_least(1, limit=self.limit, size=self.size)
        one_of("data.crop", self.crop, CROPS)
        in_unit_interval(erase=self.erase)
        if self.random_windows and not self.augment:
            raise ValueError("random_windows goes with data.augment = true, got false")
        if not self.augment and (self.crop != "padded" or self.erase):
            raise ValueError(
                f"crop and data.erase go with data.augment = true, got {self.crop!r} and "
                f"{self.erase!r} without it"
            )


@dataclass(frozen=True)
class ModelConfig:
    """The model, or a user's own (see `own_code`), and the options of its builder.

    `weights` is a file to start from; `fresh` names parts that are initialised anew nevertheless.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    fresh: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.fresh and self.weights is None:
            raise ValueError(f"fresh goes with model.weights, got {list(self.fresh)} without it")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer; in TOML its options are in the same table as `name`.

    TOML has no null: the string "none" replaces it.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over time; epochs may be fractions, and the rate changes every step.

    A milestone multiplies the rate by `factor`. `final` is the last value of the cosine or linear
    schedule, as a fraction of the rate. `warmup_share` is the length of the warm-up as a share of
    the run; its last step has the full rate, while that of `warmup_epochs` is just below it.
    """

    name: str = "constant"
    warmup_epochs: float = 0.0
    warmup_share: float = 0.0
    milestones: tuple[float, ...] = ()
    factor: float = 0.1
    final: float = 0.0

    def __post_init__(self) -> None:
        one_of("schedule.name", self.name, SCHEDULES)
        at_least(0, warmup_epochs=self.warmup_epochs, factor=self.factor, final=self.final)
        in_unit_interval(warmup_share=self.warmup_share)
        if self.warmup_share and self.warmup_epochs:
            raise ValueError(
                f"warmup_share goes without schedule.warmup_epochs, got {self.warmup_share!r} and "
                f"{self.warmup_epochs!r}"
            )
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(f"milestones must be increasing, got {list(self.milestones)}")
        if bool(self.milestones) != (self.name == "step"):
            raise ValueError(
                f"milestones go with the schedule 'step' and only with it, "
                f"got {list(self.milestones)} with {self.name!r}"
            )


@dataclass(frozen=True)
class TrainConfig:
    """Length, batches and loss of a run: one of `LOSSES`, or a user's own (see `own_code`).

    `square_k` and `square_m` are k and M of the square loss of Hui & Belkin. `label_smoothing`
    applies to cross entropy in training, not in tests. `clip_norm` limits the norm of all gradients
    together. `context` is the length of a text example. `eval_every` counts steps; the default is
    once an epoch.

    Three settings matter only on a GPU. `deterministic` makes two equal runs equal bit for bit;
    without it they may be faster. `graphs` replays forward and backward pass from CUDA graphs,
    which gives small models the same numbers sooner. `channels_last` is the memory format that bf16
    convolutions prefer.

    `parallel` is how the ranks that torchrun started divide the model. It is not part of the run's
    identity: the result is the same up to rounding, dropout and batch statistics, which each rank
    has for itself.

    `rollback` is how often a diverging run may go back to its last good state (see `rollback`).
    """

    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 128
    loss: str = "cross_entropy"
    square_k: float = 1.0
    square_m: float = 1.0
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    autocast: str = "none"
    seed: int = 0
    device: str = "auto"
    context: int = 0
    eval_every: int | None = None
    deterministic: bool = True
    graphs: bool = False
    channels_last: bool = False
    parallel: str = "none"
    rollback: int = 0

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(
                f"epochs or train.steps must be given, one of the two; "
                f"got epochs {self.epochs!r} and steps {self.steps!r}"
            )
        one_of("train.loss", self.loss, LOSSES, own=True)
        one_of("train.autocast", self.autocast, AUTOCASTS)
        one_of("train.parallel", self.parallel, PARALLELS)
        at_least(1, epochs=self.epochs, steps=self.steps, batch_size=self.batch_size)
        at_least(1, eval_every=self.eval_every)
        at_least(0, context=self.context, rollback=self.rollback)
        if not 0 <= self.seed < 2**32:  # torch takes no more bits: larger ones would repeat others
            raise ValueError(f"seed must be from 0 to {2**32 - 1}, got {self.seed!r}")
        in_unit_interval(label_smoothing=self.label_smoothing)
        if self.graphs and self.parallel != "none":
            raise ValueError(
                f"graphs goes with train.parallel = 'none', got {self.parallel!r}: what ranks "
                "exchange is not recorded"
            )
        if self.rollback and self.parallel != "none":
            raise ValueError(
                f"rollback goes with train.parallel = 'none', got {self.parallel!r}: good states "
                "are those of one process"
            )
        if self.graphs and not self.deterministic:
            raise ValueError(
                "graphs goes with train.deterministic = true, got false: not all of the fastest "
                "kernels can be recorded"
            )
        if self.label_smoothing and self.loss != "cross_entropy":
            raise ValueError(
                f"label_smoothing goes with the loss 'cross_entropy', "
                f"got {self.label_smoothing!r} with {self.loss!r}"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be positive, got {self.clip_norm!r}")
        if not (self.square_k > 0 and self.square_m > 0):
            raise ValueError(
                f"square_k and train.square_m must be positive, "
                f"got {self.square_k!r} and {self.square_m!r}"
            )


@dataclass(frozen=True)
class OutputConfig:
    """Additional outputs; nothing here changes a result or the run's identity.

    `weights` saves those of the trained model. `wandb` is the project of Weights & Biases to log
    to. `timing` splits the time of a step into data, forward, backward and optimizer.
    """

    weights: bool = False
    tensorboard: bool = False
    wandb: str | None = None
    timing: bool = True
    checkpoint_minutes: float = 10.0

    def __post_init__(self) -> None:
        at_least(0, checkpoint_minutes=self.checkpoint_minutes)


@dataclass(frozen=True)
class Config:
    """All settings of one run."""

    label: str
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    @property
    def title(self) -> str:
        """The name of the run in messages."""
        return f"{self.label} seed {self.train.seed}"

    def with_seed(self, seed: int) -> Config:
        return replace(self, train=replace(self.train, seed=seed))

    def as_table(self) -> Table:
        """The settings that determine the run, in the form of the TOML file, for records."""
        table = asdict(self)
        del table["label"], table["output"], table["train"]["parallel"]
        options = table["optimizer"].pop("options")
        table["optimizer"].update(options)
        for section, later in _LATER:
            if not table[section][later]:
                del table[section][later]
        if self.model.weights is None:
            del table["model"]["weights"], table["model"]["fresh"]
        else:  # the same weights may be in another folder
            table["model"]["weights"] = own_code.file_checksum(Path(self.model.weights))
        for section, field_name in own_code.SETTINGS:
            name = table[section][field_name]
            if own_code.is_own(name):
                table[section][field_name] = own_code.shown(name)
                table.setdefault("own_code", {})[own_code.shown(name)] = own_code.checksum(name)
        result: Table = json.loads(json.dumps(table))  # tuples become lists, as when read back
        return result

    def identity(self) -> str:
        """A hash of `as_table`: equal for runs that must give equal results."""
        text = json.dumps(self.as_table(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
