"""What stands in for a pool of processes in tests: it only knows what it was given."""

from __future__ import annotations


class StandInPool:
    """The part of a pool that has nothing to do with processes."""

    def __init__(self, work, jobs):
        self.work, self.jobs, self.items = work, jobs, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    @property
    def running(self):
        return self.items

    @property
    def free(self):
        return self.jobs - len(self.items)

    def submit(self, item):
        self.items.append(item)
