"""The tables of results, and the colours that go with them."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pytest

from lab.report.fake_records import comparison, record, write
from rootfree_lab.report import figures, palette
from rootfree_lab.report.experiments import arrange
from rootfree_lab.report.page import latex
from rootfree_lab.report.records import read
from rootfree_lab.report.tables import columns


def experiments_of(tmp_path, records):
    return arrange(read(write(tmp_path / "records.jsonl", records))[0])[0]


def ended(label, error, *, seed=0, **changes):
    final = {"train_loss": 0.1, "test_loss": 0.2, "test_error": error}
    return record(label, seed=seed, final=final, **changes)


def seeded(label, errors, **changes):
    return [ended(label, error, seed=seed, **changes) for seed, error in enumerate(errors)]


def test_values_are_means_and_deviations_over_seeds(tmp_path):
    records = [*seeded("A", [0.10, 0.12, 0.17]), ended("B", 0.2)]
    (experiment,) = experiments_of(tmp_path, records)
    found = {column.title: column for column in columns(experiment)}
    cell = found["Test error, %"].cells["A"]
    assert (cell.mean, cell.deviation) == ("13.00", "3.61")
    cell = found["Test error, %"].cells["B"]
    assert (cell.mean, cell.deviation) == ("20.00", "")
    assert [c.title for c in columns(experiment) if c.in_paper] == [
        "Test error, %", "Time, min", "Peak memory, GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "best"),
    [
        ([0.10, 0.12], [0.20, 0.22], True),  # 0.11 + 0.014 < 0.21 - 0.014
        ([0.10, 0.12], [0.12, 0.14], False),  # the intervals overlap
        ([0.10, 0.10], [0.11, 0.11], True),
        ([0.10, 0.10], [0.10, 0.10], False),
        ([0.10, 0.12], [0.50], False),  # one seed has no spread
        ([0.10], [0.50, 0.52], False),
    ],
)
def test_best_is_what_lies_below_the_others_by_more_than_the_spread(tmp_path, a, b, best):
    records = [*seeded("A", a), *seeded("B", b), *seeded("C", [0.9, 0.91])]
    (experiment,) = experiments_of(tmp_path, records)
    cells = columns(experiment)[0].cells
    assert [cells[label].best for label in "ABC"] == [best, False, False]
    (alone,) = experiments_of(tmp_path, seeded("A", a))
    assert not columns(alone)[0].cells["A"].best


def test_memory_on_a_cpu_has_no_best(tmp_path):
    def best_memory(device):
        records = [
            record(label, seed=seed, versions={"device": device})
            for label in ("SGD", "Shampoo")
            for seed in (0, 1)
        ]
        (experiment,) = experiments_of(tmp_path, records)
        (column,) = [c for c in columns(experiment) if c.title.startswith("Peak memory")]
        return [label for label, cell in column.cells.items() if cell.best]

    assert best_memory("cpu") == []
    assert best_memory("NVIDIA H200") == ["SGD"]


def trained(label, losses, *, seed=0):
    """A run whose training loss is given for steps 100, 200, ..., ten seconds each."""
    curve = [
        {"step": 100 * n, "seconds": 10.0 * n, "train_loss": loss}
        for n, loss in enumerate(losses, start=1)
    ]
    return record(label, seed=seed, curve=curve, final={"train_loss": losses[-1]})


def test_steps_and_time_to_the_loss_that_adamw_ends_with(tmp_path):
    records = [
        trained("AdamW", [4, 3, 2]),
        trained("AdamW", [4, 3, 1], seed=1),
        trained("SGD", [4, 3, 1.5]),  # reaches 2 two thirds of the way from 200 to 300
        trained("SGD", [4, 3, 1.5], seed=1),  # does not reach 1
        trained("Shampoo", [4, 3, 2.5]),
        trained("IFShampoo", [1, 1, 1]),
    ]
    (experiment,) = experiments_of(tmp_path, records)
    found = {c.title: c.cells for c in columns(experiment)}
    steps, time = found["Steps to AdamW’s loss"], found["Time to AdamW’s loss, s"]
    assert {label: cell.mean for label, cell in steps.items()} == {
        "AdamW": "300", "SGD": "267", "IFShampoo": "100",
    }  # fmt: skip
    assert (steps["AdamW"].note, steps["SGD"].note) == ("", "1 of 2")
    assert (time["SGD"].mean, time["IFShampoo"].mean) == ("26.7", "10.0")
    without = experiments_of(tmp_path, [trained("SGD", [2, 1]), trained("Shampoo", [2, 1])])
    assert not any("AdamW" in column.title for column in columns(without[0]))


def test_numbers_of_very_different_size_keep_three_digits(tmp_path):
    def at(label, losses):
        for seed, loss in enumerate(losses):
            final = {"train_loss": loss, "test_loss": loss}
            yield record(label, seed=seed, final=final, curve=[], seconds={}, memory={})

    records = [*at("A", [1.5e-7, 2.5e-7]), *at("B", [0.12345]), *at("C", [2.0])]
    (experiment,) = experiments_of(tmp_path, records)
    cells = next(c.cells for c in columns(experiment) if c.title == "Training loss")
    assert [cells[label].mean for label in "ABC"] == ["2.00e-7", "0.123", "2.00"]
    assert cells["A"].deviation == "7.07e-8"


def test_survivors_are_not_best(tmp_path):
    failed = ended("A", 0.05, seed=2, completed=False)
    records = [*seeded("A", [0.05, 0.05]), failed, *seeded("B", [0.1, 0.1]), *seeded("C", [1, 1])]
    (experiment,) = experiments_of(tmp_path, records)
    cells = columns(experiment)[0].cells
    assert cells["A"].mean == "5.00"
    assert [cells[label].best for label in "ABC"] == [False, True, False]


def test_nothing_finished(tmp_path):
    (experiment,) = experiments_of(tmp_path, [record(completed=False)])
    assert columns(experiment) == []
    assert r"\begin{tabular}{l}" in latex([experiment])


def test_latex(tmp_path):
    strange = record("50% <b> & $x_1$ \\", data="sotu", model="lstm", final={"test_loss": 2e-7})
    text = latex(experiments_of(tmp_path, [*comparison(), strange]))
    assert r"\begin{tabular}{lrrrrrrrrrrrr}" in text
    assert r" & \multicolumn{4}{c}{resnet34 on cifar10} & \multicolumn{4}{c}{vit\_tiny on" in text
    assert r"\cmidrule(lr){6-9}" in text
    (line,) = [line for line in text.splitlines() if line.startswith("50")]
    assert line.startswith(
        r"50\% \textless{}b\textgreater{} \& \$x\_1\$ \textbackslash{} & -- & --"
    )
    assert r"& $2.00 \cdot 10^{-7}$ &" in line
    assert line.endswith(r" & 1 \\")
    (best,) = [line for line in text.splitlines() if line.startswith("IFShampoo")]
    assert best.split(" & ")[1].startswith(r"$\mathbf{5.")
    (adamw,) = [line for line in text.splitlines() if line.startswith("AdamW")]
    assert adamw.split(" & ")[4] == "2 of 3"
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in body[1:]} == {12}


# How people see who lack one kind of cones: Machado, Oliveira and Fernandes (2009), severity 1.
VISION = {
    "normal": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def linear(colour: str):
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def oklab(light):
    cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    axes = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    return np.array(axes) @ np.cbrt(np.array(cones) @ np.clip(light, 0, 1))


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK], ids=["light", "dark"])
def test_colours_differ_for_all_eyes(colours, vision):
    """0.02 is a just noticeable difference of Oklab; lines need several."""
    seen = [oklab(np.array(VISION[vision]) @ linear(colour)) for colour in colours]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 0.07


def test_styles_are_one_to_one_as_long_as_there_are_enough():
    labels = [f"method {number}" for number in range(palette.MOST_DRAWN)]
    looks = palette.styles([*labels, labels[0]])
    assert list(looks) == labels
    assert len(set(looks.values())) == len(labels)
    assert len(palette.variables()) == len(palette.LIGHT) + len(palette.PARTS) + 4  # none twice


def test_the_style_of_figures_has_colours_that_a_page_can_replace():
    used = {f"#{colour}" for colour in re.findall(r"\b[0-9a-f]{6}\b", figures.STYLE.read_text())}
    assert used
    assert used <= palette.variables().keys()
