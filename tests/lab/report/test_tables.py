"""The table of the paper, and the colours that go with it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from lab.report.fake_records import comparison, record, write
from rootfree_lab.report import palette
from rootfree_lab.report.experiments import arrange
from rootfree_lab.report.records import read
from rootfree_lab.report.tables import columns, latex, with_power


def experiments_of(tmp_path, records):
    return arrange(read(write(tmp_path / "records.jsonl", records))[0])[0]


def ended(label, error, *, seed=0, **changes):
    final = {"train_loss": 0.1, "test_loss": 0.2, "test_error": error}
    return record(label, seed=seed, final=final, **changes)


def test_values_are_means_and_deviations_over_seeds(tmp_path):
    records = [ended("A", e, seed=s) for s, e in enumerate([0.10, 0.12, 0.17])] + [ended("B", 0.2)]
    (experiment,) = experiments_of(tmp_path, records)
    found = {column.title: column for column in columns(experiment)}
    cell = found["Test error, %"].cells["A"]
    assert (cell.mean, cell.deviation, cell.best) == ("13.00", "3.61", True)
    cell = found["Test error, %"].cells["B"]
    assert (cell.mean, cell.deviation, cell.best) == ("20.00", "", False)
    assert [c.title for c in columns(experiment) if c.in_paper] == [
        "Test error, %", "Time, min", "Peak memory, GiB",
    ]  # fmt: skip


def test_equal_numbers_are_both_best_and_one_alone_is_not(tmp_path):
    (experiment,) = experiments_of(tmp_path, [ended("A", 0.1), ended("B", 0.100001)])
    cells = columns(experiment)[0].cells
    assert cells["A"].best
    assert cells["B"].best
    (experiment,) = experiments_of(tmp_path, [ended("A", 0.1)])
    assert not columns(experiment)[0].cells["A"].best


def test_numbers_of_very_different_size_keep_three_digits(tmp_path):
    def trained(label, losses):
        for seed, loss in enumerate(losses):
            final = {"train_loss": loss, "test_loss": 0.2, "test_error": 0.1}
            yield record(label, seed=seed, final=final)

    records = [*trained("A", [1.5e-7, 2.5e-7]), *trained("B", [0.12345]), *trained("C", [2.0])]
    (experiment,) = experiments_of(tmp_path, records)
    cells = next(c.cells for c in columns(experiment) if c.title == "Training loss")
    assert [cells[label].mean for label in "ABC"] == ["2.00e-7", "0.123", "2.00"]
    assert cells["A"].deviation == "7.07e-8"
    assert [cells[label].best for label in "ABC"] == [True, False, False]
    assert with_power("2.00e-7", r" \cdot 10^{{{}}}") == r"2.00 \cdot 10^{-7}"
    assert with_power("2.00", "^{}") == "2.00"


def test_survivors_are_not_best(tmp_path):
    failed = ended("A", 0.05, seed=1, completed=False)
    (experiment,) = experiments_of(tmp_path, [ended("A", 0.05), failed, ended("B", 0.1)])
    cells = columns(experiment)[0].cells
    assert cells["A"].mean == "5.00"
    assert not cells["A"].best
    assert cells["B"].best


def test_nothing_finished(tmp_path):
    (experiment,) = experiments_of(tmp_path, [record(completed=False)])
    assert columns(experiment) == []
    assert r"\begin{tabular}{l}" in latex([experiment])


def test_latex(tmp_path):
    records = [*comparison(), record("50% <b> & $x_1$ \\", data="sotu", model="lstm")]
    text = latex(experiments_of(tmp_path, records))
    assert r"\begin{tabular}{lrrrrrrrrr}" in text
    assert r"\multicolumn{3}{c}{vit\_tiny on cifar100}" in text
    assert r"50\% \textless{}b\textgreater{} \& \$x\_1\$ \textbackslash{} & -- & --" in text
    (best,) = [line for line in text.splitlines() if line.startswith("IFShampoo")]
    assert best.split(" & ")[1].startswith(r"$\mathbf{5.")
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in body[1:]} == {9}


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
