"""How an attempt at a trial ends."""

from __future__ import annotations

# These end the trial: it is never carried out again.
COMPLETED, DIVERGED, PRUNED = "completed", "diverged", "pruned"
# Ends the trial too, unless failed trials are to be tried again.
ERROR = "error"
# To be tried once more, alone.
MEMORY, DIED = "memory", "died"
# To be done again.
ABANDONED, INTERRUPTED, WITHDRAWN = "abandoned", "interrupted", "withdrawn"
# To be done again, but not now: the folder takes nothing more, which ends the search.
FULL = "full"
