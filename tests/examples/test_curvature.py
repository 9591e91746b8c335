"""The example runs: every curvature in the table, and a figure."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "curvature.py"


def test_the_example_trains_with_every_curvature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    example = runpy.run_path(str(EXAMPLE))
    figure = tmp_path / "figure.png"
    example["main"](["--steps", "4", "--batch", "8", "--lrs", "1e-3", "--out", str(figure)])
    assert figure.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for name in example["CURVATURES"]:
        assert name in printed
    assert "nan" not in printed


def test_a_diverged_run_is_not_the_best() -> None:
    best = runpy.run_path(str(EXAMPLE))["best"]
    nan, inf = float("nan"), float("inf")
    assert best({0.1: [nan], 0.2: [inf], 0.3: [2.0], 0.4: [3.0]}) == 0.3
