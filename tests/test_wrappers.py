"""A batch size that was set on a wrapper, which keeps it to itself."""

from __future__ import annotations

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

import rootfree


class Holding:
    """A wrapper as Accelerate's: an optimizer in its attributes, everything else passed on."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Differently(Holding):
    """Nothing says that a method must call its object self."""

    def step(this, closure=None):  # noqa: N805
        return this.optimizer.step(closure)


class Inheriting(Optimizer):
    """A wrapper as Lookahead and SAM are often written."""

    def __init__(self, base) -> None:
        self.base_optimizer = base
        super().__init__(base.param_groups, {})

    def step(self, closure=None):
        return self.base_optimizer.step(closure)


class Slotted:
    """Neither a `__dict__` nor a place for weak references."""

    __slots__ = ("base", "batch_size")

    def __init__(self, base) -> None:
        self.base = base

    @property
    def param_groups(self):
        return self.base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


class Trainer:
    """Not an optimizer: its batch size is that of its data."""

    def __init__(self, optimizer) -> None:
        self.optimizer, self.batch_size = optimizer, 8

    def step(self):
        self.optimizer.step()


def made(**options):
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    return rootfree.RFRMSprop([p], **options)


WRAPPERS = {
    "holding": Holding,
    "differently": Differently,
    "inheriting": Inheriting,
    "slotted": Slotted,
    "nested in slots": lambda optimizer: Slotted(Holding(optimizer)),
    "nested": lambda optimizer: Holding(Inheriting(optimizer)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("late", [False, True])
def test_a_wrapper_that_keeps_it_to_itself_is_named_once(wrap, late):
    wrapper = wrap(made(batch_size=32))
    if late:  # told after steps without
        wrapper.step()
        wrapper.step()
    wrapper.batch_size = 64
    with pytest.warns(UserWarning, match=r"batch_size = 64 was set on \w+, which.* use 32"):
        wrapper.step()
    wrapper.step()  # a second warning would be an error


def test_missing_is_an_error_as_ever():
    wrapper = Holding(made())
    wrapper.batch_size = 64
    with pytest.warns(UserWarning, match="64"), pytest.raises(RuntimeError, match="is not set"):
        wrapper.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda o: o,
        Holding,
        Inheriting,
        Slotted,
        Trainer,
        lambda o: Trainer(Holding(o)),
    ],
)
def test_nobody_else_is_bothered(make):
    optimizer = made(batch_size=32)
    outer = make(optimizer)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            outer.step()
            scheduler.step()


def test_the_same_number_on_both_sides():
    wrapper = Holding(made(batch_size=32))
    wrapper.batch_size = 32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapper.step()
    wrapper.batch_size = 16
    with pytest.warns(UserWarning, match="batch_size = 16"):
        wrapper.step()


def test_a_counted_batch_size_is_the_one_that_counts():
    model = nn.Linear(3, 1)
    optimizer = rootfree.RFRMSprop(model.parameters())
    wrapper = Holding(optimizer)
    rootfree.track_batch_size(model, wrapper)
    wrapper.batch_size = 16
    model(torch.ones(8, 3)).mean().backward()
    wrapper.step()
    assert optimizer.batch_size == 8


def test_wrappers_are_not_kept_alive():
    optimizer = made(batch_size=32)
    wrapper = Holding(optimizer)
    wrapper.step()
    gone = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert gone() is None
    optimizer.step()
