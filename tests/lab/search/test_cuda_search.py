"""A search on a GPU: trials side by side, and one for which there is no memory beside others."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from rootfree_lab.cli.app import app
from rootfree_lab.files.records import read_records
from rootfree_lab.training.run import records_path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Takes more than half of the GPU: two of them do not fit.
GREEDY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, dataset):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, dataset.classes))
        self.held = None

    def forward(self, x):
        if x.is_cuda and self.held is None:
            free, total = torch.cuda.mem_get_info(x.device)
            self.held = torch.empty(int(0.6 * total), dtype=torch.uint8, device=x.device)
        return self.layers(x)
"""


@pytest.mark.parametrize("greedy", [False, True])
def test_trials_share_a_gpu(tmp_path, config_file, greedy):
    (tmp_path / "net.py").write_text(GREEDY)
    arguments = ["search", str(config_file), "--out", str(tmp_path / "out"), "--jobs", "3"]
    arguments += ["--set", "train.device=cuda", "--set", "search.trials=[2, 1]"]
    arguments += ["--set", "model.name=net.py:Net"] if greedy else []
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    records = read_records(records_path(tmp_path / "out"))
    assert len(records) == 6
    assert all(record["completed"] for record in records)
    assert {record["versions"]["device"] for record in records} == {torch.cuda.get_device_name()}
