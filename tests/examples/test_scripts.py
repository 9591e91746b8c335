"""Every example runs, at its smallest, and says what it should; one for ranks in test_ranks.py."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

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
#: tested in other files
ELSEWHERE = {"curvature", "many_devices", "paper_tour"}
#: no script
HELPERS = {"digits"}

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def test_every_example_is_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, *ELSEWHERE, *HELPERS}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs(*SCRIPTS[name][2])) for name in SCRIPTS]
)
def test_the_example_learns(name, capsys, monkeypatch, tmp_path):
    arguments, pattern, _ = SCRIPTS[name]
    monkeypatch.setattr("sys.argv", [name, *arguments.split()])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    found = re.search(pattern, capsys.readouterr().out)
    assert found is not None
    if "percent" in found.groupdict():  # well above a guess, which is at most a third
        assert float(found["percent"]) > 40


def test_the_tour_shows_what_the_paper_claims(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    tour = runpy.run_path(str(EXAMPLES / "paper_tour.py"))
    tour["main"](["--steps", "20", "--out", str(tmp_path / "tour.png")])
    assert (tmp_path / "tour.png").read_bytes().startswith(b"\x89PNG")
    assert re.search(r"slope of the difference +(1\.9|2\.0)", capsys.readouterr().out)
    mean, total, without = tour["scale"]().values()
    torch.testing.assert_close(mean, total, rtol=1e-12, atol=0)
    assert not torch.allclose(mean, without, rtol=1e-2)
    free, scaled, root, root_scaled = tour["coordinates"]().values()
    torch.testing.assert_close(free, scaled, rtol=1e-9, atol=0)
    assert not torch.allclose(root, root_scaled, rtol=1e-2)
    losses = {name: float(curve[-5:].mean()) for name, curve in tour["training"](60).items()}
    assert losses["IF-Shampoo (no inverse)"] == pytest.approx(losses["RF-Shampoo"], rel=0.15)
    assert max(losses.values()) < 1.5
