"""How soon a run reaches the training loss that AdamW ends with."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rootfree_lab.report.experiments import Experiment, Group
from rootfree_lab.report.records import Run
from rootfree_lab.report.statistics import median, series

REFERENCE = "AdamW"
METRIC = "train_loss"


def reference(experiment: Experiment) -> Group | None:
    """The group of AdamW that has finished; of several, the one with the best headline metric."""
    found = [group for group in experiment.groups if group.finished]
    found = [group for group in found if group.runs[0].optimizer == REFERENCE]
    return min(found, key=experiment.rank, default=None)


def milestone(group: Group, axis: str) -> Callable[[Run], float]:
    """The step or the second at which a run reaches the final loss of `group` with its seed.

    A seed that the group does not have is compared with the group's median. The value is
    interpolated between the points of the curve; it is nan where the run does not get there.
    """
    targets = {run.seed: run.final[METRIC] for run in group.finished if run.seed}
    middle = median(run.final[METRIC] for run in group.finished)
    return lambda run: crossing(run, axis, targets.get(run.seed, middle))


def crossing(run: Run, axis: str, target: float) -> float:
    """Where a run's training loss first comes down to the target, nan where it does not."""
    line = series(run.curve[axis], run.curve[METRIC])
    below = np.flatnonzero(line.y <= target)
    if not below.size:
        return math.nan
    first = int(below[0])
    if first == 0:
        return float(line.x[0])
    x, y = line.x[first - 1 : first + 1], line.y[first - 1 : first + 1]
    return float(x[0] + (x[1] - x[0]) * (y[0] - target) / (y[0] - y[1]))
