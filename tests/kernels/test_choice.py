"""Which kernels an optimizer gets: None takes them on GPUs, True in the interpreter too."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rootfree
from kernels.devices import DEVICE
from rootfree import kernels


def test_none_takes_kernels_on_gpus_alone():
    assert set(kernels.choose("heavy_ball", None)) == {"cuda"}


def test_true_takes_the_interpreter_as_well():
    assert DEVICE in kernels.choose("heavy_ball", True)


def test_false_takes_none():
    assert kernels.choose("blocks", False) == {}


def test_a_method_without_kernels_says_so():
    with pytest.raises(ValueError, match="this method has none"):
        kernels.choose("", True)


def test_fused_is_true_false_or_none():
    with pytest.raises(ValueError, match="fused must be None, True or False, got 'yes'"):
        rootfree.RFRMSprop([torch.nn.Parameter(torch.ones(2))], fused="yes")


def test_the_rules_run_on_the_cpu_unless_asked():
    optimizer = rootfree.RFRMSprop([torch.nn.Parameter(torch.ones(2))], batch_size=1)
    assert optimizer._kernel_for(torch.ones(1)) is None


@pytest.mark.parametrize("name", sorted(kernels.TABLE))
def test_every_optimizer_has_kernels_of_its_own(name):
    """They remember where parameters are: no two optimizers may share one."""
    left, right = (kernels.choose(name, True)[DEVICE] for _ in range(2))
    assert left is not right


def test_kernels_are_tried_once_and_left_alone_where_triton_fails(monkeypatch):
    device = torch.device(DEVICE)
    kernels.usable.cache_clear()
    assert kernels.usable(device)

    def fail(*args, **kwargs):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr("rootfree.kernels.diagonal.launch", fail)
    kernels.usable.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"Triton failed \(RuntimeError: no C compiler\)"):
            assert not kernels.usable(device)
        p = torch.nn.Parameter(torch.ones(2, device=DEVICE))
        optimizer = rootfree.RFRMSprop([p], batch_size=1, fused=True)
        optimizer._fused = None  # as on a GPU, where nobody insisted
        p.grad = torch.ones_like(p)
        optimizer.step()  # by the rule
        assert (p < 1).all()
        optimizer._fused = True
        with pytest.raises(RuntimeError, match="no C compiler"):
            optimizer.step()
    finally:
        kernels.usable.cache_clear()


@pytest.mark.parametrize("method", [rootfree.RFRMSprop, rootfree.IFShampoo])
def test_tensors_without_numbers_are_followed_through_the_rules(method):
    """As where the memory of a training run is estimated."""
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.randn(64, 32, device=DEVICE))
        optimizer = method([p], batch_size=8, fused=True)
        p.grad = torch.randn_like(p)
        optimizer.step()
    assert sum(t.numel() for t in optimizer.state[p].values()) >= p.numel()
