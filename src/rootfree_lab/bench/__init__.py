"""`rootfree bench`: what a step of each optimizer costs, side by side in one process.

options     what it can be asked to do
parameters  which tensors are stepped on: the sets of `shapes`, or those of a model
contenders  the optimizers by name, with their period T and the kind of their floor
timing      steps on the clock, in whole periods, with new gradients; turns: who takes them when
ceilings    what the device can do, measured in the same run; floors: what a step has to do
record      everything that was found, as JSON; table, chart and markdown show it
"""
