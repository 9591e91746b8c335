"""A pool of workers for searches that works in this process."""

from __future__ import annotations

from types import SimpleNamespace

from lab.stand_in_pool import StandInPool
from rootfree_lab.processes.side_by_side import Event
from rootfree_lab.search import loop
from rootfree_lab.training.watching import measures


class Inline(StandInPool):
    """A pool whose workers work when it is asked for events."""

    died: dict[str, int] = {}
    retired: list[list[str]] = []

    def retire_idle(self):
        self.retired.append([claim.config.label for claim, _ in self.items])

    def ask_to_stop(self):
        pass

    def answer(self, item, content):
        self.answered = content

    def events(self, seconds):
        if not self.items:
            return
        item, beside = self.items[0], len(self.items) - 1
        name = item[0].config.label
        if self.died.get(name, 0):
            self.died[name] -= 1
            self.items.pop(0)
            yield Event("died", item, "its process was ended by SIGKILL")
            return
        asked: list = []
        channel = _Channel(asked, self)
        channel.beside = beside
        outcome = self.work(item, channel)
        self.items.pop(0)
        yield Event("done", item, outcome)


class _Channel:
    def __init__(self, asked, pool):
        self.pool = pool

    def ask(self, message):
        for event in [Event("asked", self.pool.items[0], message)]:
            Inline.handler(event)
        return self.pool.answered


def work_inline(monkeypatch):
    """Have searches work in this process."""
    monkeypatch.setattr(loop, "Pool", Inline)
    monkeypatch.setattr(loop, "_OTHERS", 0.0)
    monkeypatch.setattr(measures, "gc", SimpleNamespace(collect=int))  # slow after many imports
    monkeypatch.setattr(Inline, "died", {})
    monkeypatch.setattr(Inline, "retired", [])
    original = loop._Loop.__init__

    def remember(self, *arguments):
        original(self, *arguments)
        Inline.handler = self.handle

    monkeypatch.setattr(loop._Loop, "__init__", remember)
