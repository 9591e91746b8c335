"""How many files of the library a step goes through: a reader should be able to follow it."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import rootfree

ROOT = Path(rootfree.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
BATCH = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def visited(work) -> set[str]:
    """Files of the library with a function that `work` calls."""
    found = set()

    def look(frame, event, argument):
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
    inside = {Path(name) for name in found if Path(name).is_relative_to(ROOT)}
    return {str(path.relative_to(ROOT)) for path in inside}


def path_of_a_step(optimizer, model, recording) -> set[str]:
    """Files of one step that refreshes, once everything is laid out."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        device = next(model.parameters()).device
        x = torch.randn(BATCH, 8, generator=generator).to(device)
        y = torch.randint(0, 4, (BATCH,), generator=generator).to(device)
        optimizer.zero_grad()
        with recording:
            nn.functional.cross_entropy(model(x), y).backward()
        refreshes = optimizer.refreshes_next
        found = visited(optimizer.step)
    assert refreshes
    return found


def test_a_step_by_the_rules():
    model = network()
    optimizer = rootfree.IFShampoo(model.parameters(), batch_size=BATCH, fused=False)
    found = path_of_a_step(optimizer, model, nullcontext())
    assert len(found) <= 10, sorted(found)
    section = CONTRIBUTING.read_text().partition("## The path of a step")[2].partition("\n## ")[0]
    assert found == set(re.findall(r"^\| `(\S+)` \|", section, re.MULTILINE))


def test_a_step_with_kernels():
    pytest.importorskip("triton")
    model = network().to(DEVICE)
    optimizer = rootfree.IFShampoo(
        model.parameters(), batch_size=BATCH, matmul_dtype=torch.bfloat16, fused=True
    )
    found = path_of_a_step(optimizer, model, nullcontext())
    # Triton's interpreter runs as Python what is compiled for the device.
    on_the_host = {name for name in found if not name.startswith("kernels/triton_")}
    assert "kernels/factors.py" in found
    # On a GPU two more: kernels/finite.py and shell/step_counts.py, where a CPU reads the numbers.
    assert len(on_the_host) <= 10 + 2 * (DEVICE == "cuda"), sorted(on_the_host)


def test_a_step_with_a_recorder():
    model = network()
    recorder = rootfree.KFACRecorder(model)
    optimizer = rootfree.IFShampoo(
        model.parameters(), batch_size=BATCH, curvature=recorder, fused=False
    )
    found = path_of_a_step(optimizer, model, recorder)
    assert "recorders/kfac.py" in found
    assert len(found) <= 14, sorted(found)
