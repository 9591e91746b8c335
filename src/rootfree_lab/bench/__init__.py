"""`rootfree bench`: what a step of each optimizer costs, side by side in one process.

options     the options of the command
shapes      sets of parameters to step on; model: the parameters of a model, and batches for it
contenders  the optimizers by name, with their period T and the kind of their floor
timing      timing of steps in whole periods, with new gradients; turns: the order of turns
ceilings    what the device can do, measured in the same run; floors: what a step has to do
record      all results, as JSON; table, chart and markdown show them
"""
