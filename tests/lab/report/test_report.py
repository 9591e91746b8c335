"""Reports as files: what is written, of whatever records."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from lab.report.fake_records import METHODS, comparison, record, write
from rootfree_lab.cli.app import app
from rootfree_lab.report import ReportError, curves, figures, write_report
from rootfree_lab.report.configuration import settings_table
from rootfree_lab.report.experiments import arrange
from rootfree_lab.report.palette import MOST_DRAWN, styles
from rootfree_lab.report.records import read

VOID = {"meta", "input", "wbr"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A report on thirty runs and a line that was cut off, in all formats."""
    folder = tmp_path_factory.mktemp("compared")
    return write_report(write(folder / "records.jsonl", comparison(), tail='{"lab'))


@pytest.fixture(autouse=True)
def quick_figures(monkeypatch, request) -> None:
    """`compared` and one test have all formats, laid out; the others save the time."""
    if request.function is not test_the_same_records_give_the_same_files:
        monkeypatch.setattr(figures, "FORMATS", ("svg",))
        monkeypatch.setattr(figures, "_settle", lambda figure: figure.set_layout_engine("none"))


class Checked(HTMLParser):
    """Every element is closed, in order; ids are unique; attributes are kept for questions."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)


def page_of(tmp_path, records) -> tuple[str, Checked]:
    written = write_report(write(tmp_path / "records.jsonl", records))
    text = written.page.read_text(encoding="utf-8")
    return text, Checked(text)


@pytest.mark.slow
def test_a_comparison(compared):
    written, folder = compared, compared.page.parent.parent
    assert written.page == folder / "report" / "report.html"
    assert written.runs == 30
    assert written.problems == ("records.jsonl, line 31: cut off in the middle",)
    stems = {figure.name.rpartition(".")[0] for figure in written.figures}
    assert stems == {
        f"{experiment}-{what}"
        for experiment in ("cifar10-resnet34", "cifar100-vit-tiny")
        for what in ("curves", "test-error", "time-per-step")
    }
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for figure in written.figures:
        assert figure.read_bytes().startswith(starts[figure.suffix[1:]])
    text = written.page.read_text(encoding="utf-8")
    page = Checked(text)
    shown = "".join(page.text)
    assert "30 runs (28 completed, 1 diverged, 1 incomplete), 2 experiments." in shown
    assert "2 of 3" in shown  # seeds that finished
    assert "cut off in the middle" in shown
    panels = [a["aria-label"] for tag, a in page.elements if tag == "svg" and "role" in a]
    assert len(panels) == 2 * (9 + 1)
    assert "Test error (%) against seconds, vit_tiny on cifar100" in panels
    for label in METHODS:
        assert label in shown
    # Colours come from the style sheet, so that they follow the reader's scheme.
    svgs = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"#[0-9a-f]{6}\b", svgs)
    assert str(folder) not in text


@pytest.mark.slow
def test_the_same_records_give_the_same_files(tmp_path):
    file = write(tmp_path / "records.jsonl", [record(), record(seed=1), record("SGD")])
    written = write_report(file)
    before = {path: path.read_bytes() for path in written.page.parent.rglob("*.*")}
    endings = {".html", ".png", ".svg", ".pdf", ".tex", ".csv"}
    assert {path.suffix for path in before} == endings
    for path in before:
        path.unlink()
    write_report(file)
    assert before == {path: path.read_bytes() for path in before}


@pytest.mark.slow
def test_the_page_needs_nothing_else(tmp_path):
    """To be shown, that is; what can be downloaded lies beside it."""
    text, page = page_of(tmp_path, [record(), record("SGD")])
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        for name in ("src", "xlink:href", "action", "data", "srcset"):
            assert name not in attributes
        link = attributes.get("href") or "#"
        assert link.startswith("#") or (tmp_path / "report" / link).is_file()
    assert not re.search(r"https?://|//cdn|@import", text)
    assert all(address.startswith("#") for address in re.findall(r"url\(([^)]*)\)", text))


@pytest.mark.slow
def test_links_inside_the_page_lead_somewhere(compared):
    text = compared.page.read_text(encoding="utf-8")
    page = Checked(text)
    targets = re.findall(r'(?:href="|url\()#([^")]+)', text)
    assert targets
    assert set(targets) <= set(page.ids)
    for _, attributes in page.elements:
        assert attributes.get("aria-controls") in {None, *page.ids}


NASTY = (
    "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp; $\\frac{ $ 层 \ud800"
)


@pytest.mark.slow
def test_labels_are_text_whatever_they_contain(tmp_path):
    content = record(NASTY, data=f"d{NASTY}", model=f"../{NASTY}", seed=NASTY)
    content["config"]["optimizer"][NASTY] = NASTY
    content["config"]["model"]["options"] = {"{odd}": "{0}"}
    content["versions"][NASTY] = NASTY
    content["failure"] = {"message": NASTY}
    _, page = page_of(tmp_path, [content, record()])
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert NASTY.replace("\ud800", "?") in "".join(page.text)
    written = list((tmp_path / "report").rglob("*"))
    assert all(re.fullmatch(r"[a-z0-9.-]+", path.name) for path in written)


@pytest.mark.slow
@pytest.mark.parametrize(
    "records",
    [
        pytest.param([{}], id="an empty record"),
        pytest.param([record()], id="one seed"),
        pytest.param([record(curve=[])], id="no curve"),
        pytest.param([record(seconds={}, memory={}, steps=None)], id="no times"),
        pytest.param([record(completed=False, final={})], id="nothing finished"),
        pytest.param([record(curve=record()["curve"][:1])], id="one point"),
        pytest.param([record(epochs=3), record(epochs=30, seed=1)], id="different lengths"),
        pytest.param([record(data="sotu", model="lstm")], id="no test error"),
        pytest.param([record(curve=[{"epoch": 1, "test_loss": 0.0}])], id="zero and one axis"),
        pytest.param([record(curve=[{"seconds": 5, "train_loss": -1}])], id="time alone"),
        pytest.param([record(curve=[{"step": 1, "train_loss": math.nan}])], id="not a number"),
        pytest.param([record(seconds={"optimizer": 0.0}, steps=5)], id="no time at all"),
    ],
)
def test_defects_make_a_smaller_report(tmp_path, records):
    text, page = page_of(tmp_path, records)
    assert "nan" not in "".join(page.text).lower().split()
    assert f"{len(records)} of {len(records)} runs" in text


def test_an_explosion_does_not_flatten_the_rest(tmp_path):
    wild = record("SGD")
    for number, point in enumerate(wild["curve"][5:]):
        point["train_loss"] = 10.0 ** min(number, 300)
    ((experiment,), _) = arrange(read(write(tmp_path / "records.jsonl", [wild, record()]))[0])
    figure = curves.panel(experiment, "step", "train_loss", styles(["SGD", "AdamW"]))
    low, high = figure.axes[0].get_ylim()
    assert high < 10
    assert low < 0.1
    assert figure.axes[0].get_yscale() == "log"


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (0.05, {"1", "0.5", "0.2", "0.1", "0.05"}),
        (0.005, {"1", "0.3", "0.1", "0.03", "0.01"}),
        (1e-4, {"10⁻¹", "10⁻²", "10⁻³"}),
        (1e-7, {"10⁻¹", "10⁻³", "10⁻⁶"}),
    ],
)
def test_labels_of_a_logarithmic_axis(tmp_path, last, expected):
    run = record()
    for i, point in enumerate(run["curve"]):
        point["train_loss"] = 2 * (last / 2) ** (i / (len(run["curve"]) - 1))
    (experiment,) = arrange(read(write(tmp_path / "records.jsonl", [run]))[0])[0]
    figure = curves.panel(experiment, "epoch", "train_loss", styles(["AdamW"]))
    figure.canvas.draw()
    found = {label.get_text() for label in figure.axes[0].get_yticklabels()}
    assert expected <= found


def test_a_loss_of_zero_leaves_a_logarithmic_panel_below(tmp_path):
    run = record(
        curve=[{"step": n, "train_loss": loss} for n, loss in enumerate([2, 0.1, 0.01, 0])]
    )
    (experiment,) = arrange(read(write(tmp_path / "records.jsonl", [run]))[0])[0]
    (axes,) = curves.panel(experiment, "step", "train_loss", styles(["AdamW"])).axes
    assert axes.get_yscale() == "log"
    assert 0.005 < axes.get_ylim()[0] < 0.01


@pytest.mark.slow
def test_the_page_tells_the_setup_and_the_settings(tmp_path):
    stopped = record("AdamW", seed=2, completed=False, steps=7)
    runs = [record("AdamW", seed=10), record("AdamW", seed=9), record("SGD"), stopped]
    _, page = page_of(tmp_path, runs)
    shown = " ".join("".join(page.text).split())
    assert "resnet34, 21,000,000 parameters" in shown
    assert "30 epochs, batch size 128, cross entropy, 11,700 steps" in shown
    assert "cosine, warmup epochs 1" in shown
    assert "Seeds0, 9, 10" in shown
    assert "rootfree 0.1.0, torch 2.13.0, python 3.11.2" in shown
    assert "lr 0.001, weight_decay 0.0005" in shown


def test_what_one_optimizer_alone_has_is_no_column_of_the_settings(tmp_path):
    runs = [record("AdamW"), record("SGD"), record("SGD 2", optimizer="SGD")]
    for run in runs[1:]:
        run["config"]["optimizer"]["dampening"] = 0.25
    ((experiment,), _) = arrange(read(write(tmp_path / "records.jsonl", runs))[0])
    table = settings_table(experiment.groups)
    assert list(table.names) == ["lr", "weight_decay"]
    assert table.rows["AdamW"] == ["0.001", "0.0005", ""]
    assert table.rows["SGD"] == ["0.1", "0.0005", "dampening 0.25"]


@pytest.mark.slow
def test_hundreds_of_runs(tmp_path):
    """Every run is in the table; the figures show the best methods."""
    short = [
        record(f"method {number}", seed=seed, epochs=2)
        for number in range(100)
        for seed in (0, 1, 2)
    ]
    text, page = page_of(tmp_path, short)
    assert "300 of 300 runs" in text
    assert f"Drawn are the {MOST_DRAWN} best of 100 methods" in text
    assert sum(tag == "tbody" for tag, _ in page.elements) == 300 + 3
    assert len(text) < 3_000_000


@pytest.mark.slow
def test_the_caller_s_matplotlib_is_left_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    page_of(tmp_path, [record()])
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
def test_command(tmp_path):
    file = write(tmp_path / "records.jsonl", [record()], tail="{")
    result = CliRunner().invoke(app, ["report", str(file), "--out", str(tmp_path / "r")])
    assert result.exit_code == 0, result.output
    assert "left out: records.jsonl, line 2: cut off in the middle" in result.output
    assert (tmp_path / "r" / "report.html").exists()
    assert (tmp_path / "r" / "table.tex").exists()


def test_command_says_what_is_wrong(tmp_path):
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "there is no file *.jsonl in the folder" in result.output
    assert "Traceback" not in result.output


def test_a_place_that_cannot_be_written(tmp_path):
    file = write(tmp_path / "records.jsonl", [record()])
    with pytest.raises(ReportError, match="cannot write to"):
        write_report(file, file / "below-a-file")
