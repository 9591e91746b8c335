"""Every example runs, at its smallest, and says what it should; one for ranks in test_ranks.py."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.needs import needs

EXAMPLES = Path(__file__).parents[2] / "examples"

#: arguments, a pattern of the output, and the libraries that it takes
SCRIPTS = {
    "plain_loop": ("--epochs 2", r"epoch 2: loss .* accuracy (?P<percent>[\d.]+) %", ()),
    "groups_and_companion": (
        "--epochs 1",
        r"embedding +AdamW(.|\n)*accuracy (?P<percent>.*) %",
        (),
    ),
    "accumulation_amp": ("--epochs 1", r"56 images(.|\n)*accuracy (?P<percent>.*) %", ()),
    "lightning_digits": ("--epochs 1", r"B = 56, test accuracy (?P<percent>.*) %", ("lightning",)),
    "timm_layer_decay": ("--epochs 2", r"scale 0.51(.|\n)*accuracy (?P<percent>.*) %", ("timm",)),
    "graph_network": ("--steps 30", r", (?P<percent>[\d.]+) % of all nodes", ("torch_geometric",)),
    "trainer_lora": ("--steps 2", r"B = 240", ("transformers", "accelerate", "peft")),
}
#: those with figures, and their arguments; an lr of 1e30 diverges
FIGURES = {
    "curvature": "--steps 3 --lrs 1e30 0.001",
    "paper_invariance": "",
    "paper_inverse_free": "--steps 60",
}
#: tested in other files
ELSEWHERE = {"many_devices"}
#: no scripts
HELPERS = {"curves", "digits"}
#: lines that fit on a screen
SCREEN = 75

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_every_example_is_tested_and_listed_and_fits_on_a_screen():
    paths = list(EXAMPLES.glob("*.py"))
    assert {path.stem for path in paths} == {*SCRIPTS, *FIGURES, *ELSEWHERE, *HELPERS}
    page = (EXAMPLES.parent / "docs" / "integrations.md").read_text(encoding="utf-8")
    for path in paths:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= SCREEN, path
        assert path.stem in HELPERS or f"| `{path.name}` |" in page


@pytest.fixture
def run(monkeypatch, tmp_path):
    def variables_of(name: str, arguments: str) -> dict[str, Any]:
        """The script's variables when it has ended."""
        monkeypatch.setattr("sys.argv", [name, *arguments.split()])
        monkeypatch.chdir(tmp_path)
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    return variables_of


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*SCRIPTS[name][2])) for name in SCRIPTS]
)
def test_the_example_learns(name, run, capsys):
    arguments, pattern, _ = SCRIPTS[name]
    run(name, arguments)
    found = re.search(pattern, capsys.readouterr().out)
    assert found is not None
    if "percent" in found.groupdict():  # well above a guess, which is at most a third
        assert float(found["percent"]) > 40


@pytest.fixture
def figure_of(run, tmp_path):
    pytest.importorskip("matplotlib")

    def variables_of(name: str) -> dict[str, Any]:
        variables = run(name, f"{FIGURES[name]} --out figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
        return variables

    return variables_of


def test_every_curvature_trains_with_its_best_step_size(figure_of, capsys):
    names = figure_of("curvature")["CURVATURES"]
    printed = capsys.readouterr().out
    assert len(names) == 7
    for name in names:  # the one that diverged is not the best
        assert re.search(rf"^{name} +0\.001 +[\d.]+ +[\d.]+% ", printed, re.MULTILINE), printed


def test_paths_do_not_depend_on_scale_and_units(figure_of):
    scale, units = figure_of("paper_invariance")["panels"].values()
    mean, total, without = scale.values()
    torch.testing.assert_close(mean, total, rtol=1e-12, atol=0)
    assert not torch.allclose(mean, without, rtol=1e-2)
    free, scaled, root, root_scaled = units.values()
    torch.testing.assert_close(free, scaled, rtol=1e-9, atol=0)
    assert not torch.allclose(root, root_scaled, rtol=1e-2)


def test_inverse_free_methods_follow_the_exact_ones(figure_of, capsys):
    _, training = figure_of("paper_inverse_free")["panels"].values()
    assert re.search(r"slope of the difference: (1\.9|2\.0)", capsys.readouterr().out)
    losses = {name: float(curve[-5:].mean()) for name, curve in training.items()}
    assert losses["IF-Shampoo (no inverse)"] == pytest.approx(losses["RF-Shampoo"], rel=0.15)
    assert max(losses.values()) < 1.5
