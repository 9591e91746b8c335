"""The clock of a GPU, on one that is made up: commands wait in a queue, events read its time."""

from __future__ import annotations

import pytest
import torch

from rootfree_lab.bench import memory, timing
from rootfree_lab.bench.iteration import _Trainer

CUDA = torch.device("cuda")


class Device:
    """Host and device each have a time in ms; work is handed over, and the device runs it later."""

    def __init__(self) -> None:
        self.host = self.done = 0.0

    def launch(self, host: float, device: float) -> None:
        """The host needs `host` to hand over what the device needs `device` for."""
        self.host += host
        self.done = max(self.done, self.host) + device

    def synchronize(self, device: object = None) -> None:
        self.host = max(self.host, self.done)

    def sleep(self, cycles: int) -> None:
        self.launch(0.0, 1e3 * cycles / timing._CYCLES)


@pytest.fixture
def device(monkeypatch) -> Device:
    made_up = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            made_up.launch(0.0, 0.0)
            self.time = made_up.done

        def elapsed_time(self, end) -> float:
            return end.time - self.time

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", made_up.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", made_up.sleep, raising=False)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: made_up.host / 1e3)
    return made_up


def test_a_step_that_the_device_is_busy_with(device):
    times = timing.time_steps(
        lambda: device.launch(0.1, 2.0), lambda: device.launch(0.1, 1.0), 3, CUDA
    )
    assert times == pytest.approx([2.0] * 3)


def test_a_step_that_waits_for_the_host_is_charged_for_it(device):
    def step() -> None:
        for _ in range(4):
            device.launch(1.0, 0.25)

    times = timing.time_steps(step, lambda: None, 3, CUDA)
    assert times == pytest.approx([4.25, 4.0, 4.0])
    assert timing.host_ahead(step, lambda: None, 2, CUDA) == pytest.approx(1.0)


def test_a_host_that_is_too_slow_cannot_be_ahead(device):
    def step() -> None:
        device.launch(1000.0, 1.0)

    assert timing.host_ahead(step, lambda: None, 2, CUDA) is None


def test_parts_of_an_iteration(device):
    class Contender:
        period = 2

    def iteration(x, y):
        marks = [timing.mark(CUDA)]
        for part in (30.0, 60.0, 10.0):
            device.launch(0.1, part)
            marks.append(timing.mark(CUDA))
        return marks

    trainer = _Trainer(Contender(), None, None, CUDA)
    trainer._iteration = iteration
    trainer.turn((None, None))
    # ten iterations, two at a time
    assert trainer.means(0, 1, 2, 3) == pytest.approx([100.0] * 5, rel=1e-2)
    for part, ms in ((1, 30), (2, 60), (3, 10)):
        assert trainer.means(part) == pytest.approx([ms] * 5, rel=2e-2)


def test_temporary_bytes_are_those_above_rest(monkeypatch, device):
    peak = [50]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.append(40))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[-1])
    assert memory.temporary_bytes(lambda: peak.append(47), CUDA) == 7
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60)
    assert memory.free_bytes(CUDA) == 120
