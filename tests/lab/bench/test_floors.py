"""Floors against numbers worked out by hand, and against those of the specification."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rootfree
from kernels.devices import DEVICE
from rootfree_lab.bench import floors
from rootfree_lab.bench.contenders import Built, contenders
from rootfree_lab.bench.shapes import gpt1b, resnet34, vit_b

TABLE = contenders()


def build(name: str, shapes, dtype=torch.float32):
    """A contender after one step: torch's optimizers have their state from then on."""
    parameters = [nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    built = TABLE[name].build(parameters)
    built.step()
    return built


def work(name: str, shapes, dtype=torch.float32) -> floors.Work:
    found = TABLE[name].floor(build(name, shapes, dtype))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "bytes_a_parameter"),
    [
        ("RFRMSprop", 28),  # read p, g, s, m; write p, s, m
        ("RFAdamW", 28),
        ("RFAdagrad", 20),  # without momentum
        ("torch AdamW fused", 28),
        ("torch AdamW foreach", 28),
        ("torch RMSprop foreach", 28),
        ("torch SGD momentum", 20),
    ],
)
def test_diagonal_methods_move_bytes(name, bytes_a_parameter):
    found = work(name, [(6, 5), (7,), (2, 3, 2, 2)])
    assert found.refresh_bytes == found.plain_bytes == bytes_a_parameter * (30 + 7 + 24)
    assert found.refresh_flops == 0


def test_half_precision_moves_less():
    """p and g in two bytes, torch's state too; ours stays in four."""
    assert work("torch AdamW fused", [(6, 5)], torch.bfloat16).plain_bytes == 14 * 30
    assert work("RFRMSprop", [(6, 5)], torch.bfloat16).plain_bytes == (6 + 16) * 30


def test_products_of_a_matrix():
    p, d = 6, 10
    refresh, plain = floors.product_flops((p, d), (True, True))
    assert refresh == 2 * (4 * p * p * d + 4 * p * d * d + 2 * p**3 + 2 * d**3)
    assert plain == (4 * p * p * d + 4 * p * d * d)


def test_products_of_more_axes_and_diagonal_ones():
    refresh, plain = floors.product_flops((2, 3, 5), (True, False, True))
    assert plain == 4 * 30 * (2 + 5)
    assert refresh == plain + 4 * 30 * (2 + 5) + 4 * (2**3 + 5**3)
    assert floors.product_flops((9,), (False,)) == (0, 0)


def test_inverse_free_shampoo_is_counted_from_its_blocks():
    """One dense matrix, a vector with a diagonal factor, a matrix of two blocks."""
    found = work("IFShampoo T=2", [(6, 10), (7,), (2048, 16)])
    one, one_plain = floors.product_flops((6, 10), (True, True))
    two, two_plain = floors.product_flops((1024, 16), (True, True))
    assert found.refresh_flops == one + 2 * two
    assert found.plain_flops == one_plain + 2 * two_plain
    parameters = 60 + 7 + 2048 * 16
    factors = 4 * (36 + 100 + 7 + 2 * (1024**2 + 16**2))
    assert found.plain_bytes == 20 * parameters + factors  # p, g, m read; p, m written
    assert found.refresh_bytes == 20 * parameters + 2 * factors
    assert found.matmul_dtype == torch.float32  # on a CPU


def test_plain_steps_read_the_upper_halves_of_factors():
    p = torch.nn.Parameter(torch.randn(6, 10, device=DEVICE))
    options = {"batch_size": 8, "fused": True, "matmul_dtype": torch.bfloat16}
    optimizer = rootfree.IFShampoo([p], **options)
    p.grad = torch.randn_like(p)
    optimizer.step()  # factors are in halves from then on
    found = floors.inverse_free(Built([p], [optimizer], optimizer.step))
    assert found.plain_bytes == 20 * 60 + 2 * (36 + 100)
    assert found.refresh_bytes == 20 * 60 + 2 * 4 * (36 + 100)


def test_low_memory_moves_half_of_the_state():
    found = work("IFShampoo low memory T=2", [(6, 10)])
    assert found.plain_bytes == (12 + 4) * 60 + 2 * (36 + 100)


@pytest.mark.parametrize(("name", "width"), [("fp32", 4), ("bf16", 2)])
def test_the_published_inverse_free_shampoo(name, width):
    pytest.importorskip("sirfshampoo")
    found = work(f"sirfshampoo {name} T=2", [(6, 10), (7,)])
    assert (found.refresh_flops, found.plain_flops) == floors.product_flops((6, 10), (True, True))
    held = width * (36 + 100 + 7)
    assert found.plain_bytes == 20 * 67 + held
    assert found.refresh_bytes == 20 * 67 + 4 * held  # factors and their momentum, both ways
    assert found.matmul_dtype.itemsize == width


def test_muon():
    found = work("torch Muon", [(6, 10), (7,)])
    assert found.plain_flops == 5 * (4 * 6 * 6 * 10 + 2 * 6**3)
    assert found.plain_bytes == 20 * 60 + 28 * 7


def test_factorisations_have_no_floor():
    assert TABLE["RFShampoo T=2"].floor(build("RFShampoo T=2", [(6, 5)])) is None


def dense_milliseconds(shapes, tflops: float) -> float:
    """Dense inverse-free Shampoo at T=2, diagonal for vectors, products alone."""
    total = 0.0
    for shape in shapes:
        if len(shape) == 1:
            continue
        sizes = (shape[0], int(torch.Size(shape[1:]).numel()))
        total += sum(floors.product_flops(sizes, (True, True))) / 2
    return total / tflops / 1e9


def test_the_floors_of_the_specification():
    """`vit_b dense T=2: about 4.2 ms; gpt1b: about 65 ms`, at 806 TFLOP/s and 4.24 TB/s."""
    assert dense_milliseconds(vit_b(), 806) == pytest.approx(4.2, rel=0.05)
    assert dense_milliseconds(gpt1b(), 806) == pytest.approx(65, rel=0.05)
    for shapes, milliseconds in ((vit_b(), 0.57), (gpt1b(), 5.4)):
        count = sum(torch.Size(s).numel() for s in shapes)
        assert 28 * count / 4.24e9 == pytest.approx(milliseconds, rel=0.02)
    assert resnet34()
