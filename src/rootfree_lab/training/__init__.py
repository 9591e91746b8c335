"""One run: from its config to its record.

run         to the end or to an interruption, with checkpoints
session     everything that changes while a run trains
feeding, passes, losses, lr_schedules, running  the parts of a step
divergence, rollback                            when it goes wrong
devices, parallel, reproducibility              where it runs
watching/                                       what is seen and measured of it
"""
