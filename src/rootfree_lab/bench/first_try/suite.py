"""All tasks by name, with their steps and schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rootfree_lab.bench.first_try import convex_tasks, graph_tasks, image_tasks, lora, text_tasks
from rootfree_lab.bench.first_try.task import Setting, Task
from rootfree_lab.config.reading import unknown_name

SCALES = ("small", "full")
CONSTANT_STEPS = 1500
_WARM_UP = 0.05  # of the steps


@dataclass(frozen=True)
class Entry:
    """A task of the suite."""

    build: Callable[[Setting], Task]
    steps: tuple[int, int]  # small, full
    schedule: str = "cosine"  # "linear" | "constant"
    data: str | None = None  # that has to be fetched or named

    @property
    def convex(self) -> bool:
        return self.schedule == "constant"


TASKS: dict[str, Entry] = {
    "mlp_digits": Entry(image_tasks.mlp_digits, (400, 1000)),
    "cnn_bn_digits": Entry(image_tasks.cnn_bn_digits, (300, 1000)),
    "cnn_digits": Entry(image_tasks.cnn_digits, (300, 1000)),
    "resnet_cifar10": Entry(image_tasks.resnet_cifar10, (150, 1200), data="cifar10"),
    "vgg_cifar10": Entry(image_tasks.vgg_cifar10, (300, 1200), data="cifar10"),
    "vit_cifar10": Entry(image_tasks.vit_cifar10, (300, 1200), data="cifar10"),
    "gpt_sotu": Entry(text_tasks.gpt_sotu, (300, 1200), "linear", data="sotu"),
    "lstm_sotu": Entry(text_tasks.lstm_sotu, (600, 1200), "linear", data="sotu"),
    "gat_cora": Entry(graph_tasks.gat_cora, (150, 600), data="cora"),
    "logistic_breast_cancer": Entry(convex_tasks.logistic_breast_cancer, (500, 1000), "constant"),
    "least_squares_diabetes": Entry(convex_tasks.least_squares_diabetes, (500, 1000), "constant"),
    "lora_digits": Entry(lora.lora_digits, (400, 1000)),
}


def chosen(names: Sequence[str]) -> list[str]:
    """The tasks of these names, all of them if there are none, in the order of the suite."""
    for name in names:
        if name not in TASKS:
            raise unknown_name("--tasks: the task", name, TASKS)
    return [name for name in TASKS if not names or name in names]


def steps_of(task: str, scale: str, *, constant: bool, steps: int | None) -> int:
    """How many steps a run has."""
    if steps is not None:
        return steps
    return CONSTANT_STEPS if constant else TASKS[task].steps[SCALES.index(scale)]


def factor(schedule: str, step: int, steps: int) -> float:
    """What the learning rate is multiplied with: a short warm-up, then a decay to zero."""
    if schedule == "constant":
        return 1.0
    warm_up = max(1, round(_WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
