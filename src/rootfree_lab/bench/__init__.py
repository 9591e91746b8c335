"""`rootfree bench`: what a step of each optimizer costs, side by side in one process.

parameters  which tensors are stepped on: the sets of `shapes`, or those of a model
contenders  the optimizers by name, with their period T and the kind of their floor
timing      steps taken in turns, in whole periods, with new gradients
ceilings    what the device can do, measured in the same run; floors: what a step has to do
record      everything that was found, as JSON; table, chart and markdown show it
"""

from rootfree_lab.bench.iteration import measure_iterations
from rootfree_lab.bench.record import IterationRecord, Record, StepRecord, read, write
from rootfree_lab.bench.steps import measure_steps

__all__ = [
    "IterationRecord",
    "Record",
    "StepRecord",
    "measure_iterations",
    "measure_steps",
    "read",
    "write",
]
