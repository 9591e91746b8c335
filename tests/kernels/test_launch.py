"""What compiled kernels are remembered by, and what tables on the device hold."""

from __future__ import annotations

import torch

from kernels.devices import DEVICE, unaligned, zeros
from rootfree.kernels.launch import _look
from rootfree.kernels.tables import AddressTable, NumberTable


def test_floats_are_one_kind_and_whole_numbers_are_not():
    """Triton compiles for the values of integers, and not for those of floats."""
    t = zeros(4)
    assert _look((t, 0.1, 5), {}) == _look((t, 0.7, 5), {})
    assert _look((t, 0.1, 5), {}) != _look((t, 0.1, 6), {})
    assert _look((t, 1, 0.5), {}) != _look((t, 0.5, 1), {})


def test_dtypes_alignment_and_constants_are_seen():
    t = zeros(4)
    assert _look((t,), {}) == _look((zeros(7),), {})
    assert _look((t,), {}) != _look((unaligned(t),), {})
    assert _look((t,), {}) != _look((t.half(),), {})
    assert _look((t,), {"A": True}) != _look((t,), {"A": False})


def test_addresses_are_sent_when_they_changed():
    table = AddressTable(2, torch.device(DEVICE))
    tensors = [zeros(4), zeros(8)]
    assert table.send(tensors)
    assert table.tensor.tolist() == [t.data_ptr() for t in tensors]
    assert table.aligned
    assert not table.send(tensors)
    moved = [tensors[0], unaligned(tensors[1])]
    assert table.send(moved)
    assert table.tensor.tolist() == [t.data_ptr() for t in moved]
    assert not table.aligned


def test_numbers_change_in_the_tensor_that_graphs_read():
    table = NumberTable(2, torch.device(DEVICE))
    tensor, place = table.tensor, table.tensor.data_ptr()
    for numbers in ((0.5, 2.0), (0.25, 2.0), (0.25, 2.0)):
        table.send(*numbers)
        assert table.tensor is tensor
        assert tensor.data_ptr() == place
        assert tuple(tensor.tolist()) == numbers


def test_numbers_are_sent_when_they_changed_alone():
    table = NumberTable(1, torch.device(DEVICE))
    table.send(0.5)
    table.tensor.fill_(7.0)
    table.send(0.5)
    assert table.tensor.item() == 7.0
    table.send(0.25)
    assert table.tensor.item() == 0.25


def test_a_step_size_may_be_a_tensor():
    """Its number, on the host; on the device it is read there."""
    table = NumberTable(2, torch.device(DEVICE))
    lr = torch.tensor(0.5)
    for value in (0.5, 0.25):
        table.send(lr.fill_(value), 2.0)
        assert table.tensor.tolist() == [value, 2.0]
