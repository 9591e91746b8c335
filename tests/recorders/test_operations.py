"""How many torch operations a step with recorded curvature takes: not more for more layers.

On a GPU each is a launch, and small ones cost the host more than the device.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import rootfree
from distributed.one_rank import Operations
from kernels.devices import DEVICE
from rootfree.kernels import axis_products, factors, fused_stack, given

pytest.importorskip("triton")

RECORDERS = {
    "kfac": lambda model: rootfree.KFACRecorder(model),
    "kfac apart": lambda model: rootfree.KFACRecorder(model, joint=False),
    "sampled": lambda model: rootfree.MonteCarloFisherRecorder(model, loss="mse"),
    "diagonal": lambda model: rootfree.HutchinsonDiagonal(model),
}


def operations(make, layers: int) -> dict[bool, Counter[str]]:
    """Of a step that refreshes, and of one that does not; kernels do nothing but are there."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(layers)]
    model = nn.Sequential(*blocks).to(DEVICE)
    recorder = make(model)
    optimizer = rootfree.IFShampoo(
        model.parameters(),
        batch_size=8,
        curvature=recorder,
        fused=True,
        matmul_dtype=torch.bfloat16,
    )
    found = {}
    for _ in range(4):
        optimizer.zero_grad()
        with recorder:
            outputs = model(torch.randn(8, 6, device=DEVICE))
            recorder.backward(mse_loss(outputs, torch.zeros_like(outputs)), outputs)
        due = optimizer.refreshes_next
        with Operations() as counted:
            optimizer.step()
        found[due] = counted.seen
    return found


# Names of operations that look at memory in another way: no launch.
VIEWS = ("view", "slice", "permute", "squeeze", "select", "as_strided", "expand", "alias")


# Launches for each layer, a weight and a bias: their sums are divided, and those of samples copied.
@pytest.mark.parametrize(
    ("kind", "each"), [("kfac", 0), ("kfac apart", 0), ("sampled", 4), ("diagonal", 2)]
)
def test_layers_of_one_form_are_worked_on_together(monkeypatch, kind, each):
    for module in (axis_products, factors, fused_stack, given):
        monkeypatch.setattr(module, "launch", lambda *_, **__: None)
    few, many = (operations(RECORDERS[kind], layers) for layers in (4, 16))
    assert many[False] == few[False]
    more = many[True] - few[True]
    launches = {name: n for name, n in more.items() if not any(view in name for view in VIEWS)}
    assert sum(launches.values()) == 12 * each, launches
    assert sum(few[True].values()) < 400
    if kind.startswith("kfac"):  # Σ aaᵀ, Σ a, Σ ggᵀ, and two norms; no stack is made of them again
        assert many[True]["aten.stack.default"] <= 5
