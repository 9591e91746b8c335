"""`rootfree bench` and `rootfree bench-table`, end to end on a CPU."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lab.bench.records import iteration_record, step_record
from rootfree_lab.bench.contenders import DEFAULT_ON_CPU, contenders
from rootfree_lab.bench.markdown import MARKS
from rootfree_lab.bench.record import read, write
from rootfree_lab.bench.shapes import SHAPE_SETS
from rootfree_lab.cli import terminal
from rootfree_lab.cli.app import app


@pytest.fixture(autouse=True)
def wide_console(monkeypatch) -> None:
    monkeypatch.setattr(terminal, "console", Console(width=250))


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


FAST = ("--turns", "1", "--device", "cpu")


@pytest.mark.slow
def test_all_contenders(tmp_path):
    """All but the compiled one, which would compile for longer than all others take."""
    files = tmp_path / "tiny.json", tmp_path / "tiny.png"
    result = run(
        "bench", "--shapes", "tiny", "--optimizer", "*", "--without", "*compiled",
        "--json", str(files[0]), "--chart", str(files[1]), *FAST,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = read(files[0])
    names = [name for name in contenders() if not name.endswith("compiled")]
    assert [row.name for row in record.rows] == names
    for row in record.rows:
        assert f"│ {row.name} " in result.output
        if "KFAC" in row.name:  # there is no forward pass to record here
            assert "--iteration" in row.failure
        elif row.family != "peer" or row.name == "Shampoo T=2":
            assert row.failure is None, row
            assert row.ms.median > 0
    reference = record.rows[0]
    assert reference.name == record.reference == "torch AdamW fused"
    assert reference.ratio == 1
    assert 8 <= reference.state_bytes_per_parameter < 9  # two float32 numbers, and step counts
    assert record.count == 64 * 32 + 64 + 8 * 4 * 9
    assert record.settings["turns"] == 1
    assert {"torch", "python", "rootfree"} <= set(record.environment.versions)
    assert min(record.ceilings.copy, record.ceilings.bf16, record.ceilings.fp32) > 0
    shampoo = {row.name: row for row in record.rows}["IFShampoo T=2"]
    assert shampoo.period == 2
    assert shampoo.floor_ms > 0
    assert shampoo.refresh_ms > 0
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_the_published_optimizer_is_measured():
    pytest.importorskip("sirfshampoo")
    result = run("bench", "--shapes", "tiny", "--optimizer", "sirfshampoo*", *FAST)
    assert result.exit_code == 0, result.output
    assert "not measured" not in result.output


def test_other_options(tmp_path):
    file = tmp_path / "a.json"
    result = run(
        "bench", "--model", "small_cnn", "--dtype", "bf16", "--optimizer", "RFRMSprop",
        "--reference", "torch SGD momentum", "--graph", "--seconds", "0.5", "--json", str(file),
        *FAST,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = read(file)
    assert (record.parameters, record.dtype) == ("small_cnn", "bfloat16")
    names = [row.name for row in record.rows]
    assert names == ["torch SGD momentum", "RFRMSprop", "RFRMSprop, graph"]
    assert record.rows[2].failure == "CUDA graphs need a GPU"
    assert "RFRMSprop, graph: not measured, CUDA graphs need a GPU" in result.output


@pytest.mark.slow
def test_iteration(tmp_path):
    files = tmp_path / "i.json", tmp_path / "i.svg"
    result = run(
        "bench", "--iteration", "small_cnn", "--batch", "2", "--without", "sirf*", "--json",
        str(files[0]), "--chart", str(files[1]), *FAST,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = read(files[0])
    assert (record.model, record.batch) == ("small_cnn", 2)
    assert {row.name: row.failure for row in record.rows}["IFShampoo T=2"] is None
    assert "<svg" in files[1].read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "vgg"), "'vgg' is unknown"),
        (("--model", "vgg"), "--model: the model (of timm or) 'vgg' is unknown"),
        (("--iteration", "vgg"), "--iteration: the model (of timm or) 'vgg'"),
        (("--optimizer", "Adam"), "--optimizer: the optimizer 'Adam' is unknown"),
        (("--reference", "Adam"), "--reference: the optimizer 'Adam' is unknown"),
        (("--dtype", "fp64"), "--dtype: 'fp64' is unknown; allowed: fp32, bf16"),
        (("--device", "tpu"), "--device: 'tpu' is unknown"),
        (("--seconds", "0"), "--seconds must be a positive number, got 0.0"),
        (("--seconds", "nan"), "--seconds must be a positive number, got nan"),
        (("--turns", "0"), "--turns"),
        (("--batch", "0"), "--batch"),
        (("--shapes", "tiny", "--model", "small_cnn"), "give one of them"),
        (("--iteration", "small_cnn", "--shapes", "tiny"), "--shapes has no place"),
        (("--iteration", "small_cnn", "--model", "small_vit"), "--model has no place"),
        (("--iteration", "small_cnn", "--graph"), "--graph has no place"),
        (("--iteration", "small_cnn", "--dtype", "bf16"), "--dtype has no place"),
        (("--json", "no/such/folder/a.json"), "--json: there is no folder 'no/such/folder'"),
        (("--chart", "a.gif"), "--chart: the file must end in .png, .svg, .pdf, got 'a.gif'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    result = run("bench", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_unknown_names_are_answered_with_the_known_ones():
    assert all(name in run("bench", "--shapes", "vgg").output for name in SHAPE_SETS)
    output = run("bench", "--optimizer", "Adam").output
    assert all(name in output for name in contenders())


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run("bench", "--device", "cuda")
    assert result.exit_code == 2
    assert "--device is 'cuda', but there is no CUDA device here" in result.output


def test_tables_of_files(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"]
    for record, file in zip(
        (step_record(), step_record("gpt1b"), iteration_record()), files, strict=True
    ):
        write(record, file)
    result = run("bench-table", *map(str, files))
    assert result.exit_code == 0, result.output
    assert "| ms a step (state bytes a parameter) | vit_b | gpt1b |" in result.output
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{MARKS.begin}\n{MARKS.end}\n")
    result = run("bench-table", *map(str, files), "--page", str(page), "--charts", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "| vit_b | gpt1b |" in page.read_text()
    assert (tmp_path / "c.png").exists()


@pytest.mark.parametrize("case", ["no file", "no record", "no page", "no marks"])
def test_bad_tables(case, tmp_path):
    file, page = tmp_path / "a.json", tmp_path / "page.md"
    if case != "no file":
        write(step_record(), file)
    if case == "no record":
        file.write_text("{}")
    if case == "no marks":
        page.write_text("text")
    options = ["--page", str(page)] if case.endswith(("page", "marks")) else []
    result = run("bench-table", str(file), *options)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.output.startswith("Error: ")


def test_defaults_on_a_processor(tmp_path):
    file = tmp_path / "a.json"
    result = run("bench", "--shapes", "tiny", "--json", str(file), *FAST)
    assert result.exit_code == 0, result.output
    assert [row.name for row in read(file).rows] == list(DEFAULT_ON_CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tmp_path):
    steps, iterations = tmp_path / "a.json", tmp_path / "b.json"
    result = run(
        "bench", "--shapes", "tiny", "--graph", "--turns", "2", "--seconds", "2", "--without",
        "*compiled", "--json", str(steps),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = {row.name: row for row in read(steps).rows}
    for name in ("torch AdamW fused", "RFRMSprop", "IFShampoo T=2"):
        assert rows[name].failure is None
        assert rows[name].temporary_bytes is not None
        assert rows[name].device_ms > 0
    assert rows["IFShampoo T=2"].matmul_dtype == "bfloat16"
    result = run("bench", "--iteration", "small_vit", "--turns", "2", "--json", str(iterations))
    assert result.exit_code == 0, result.output
    assert all(row.peak_bytes > 0 for row in read(iterations).rows if not row.failure)
