"""Reports and tables whose files fail: the old file or the new one, whole."""

from __future__ import annotations

import errno

import pytest
from matplotlib.figure import Figure

from lab.faults import FaultyFiles, faults
from lab.report.fake_records import comparison, record, write
from rootfree_lab.files.durable import NotWritten
from rootfree_lab.files.toml_writing import write_toml
from rootfree_lab.report import figures
from rootfree_lab.report import write as writing
from rootfree_lab.report.export import export

KINDS = [{"error": errno.ENOSPC}, {"error": errno.ENOSPC, "short": True}, {"error": errno.EIO}]


def make_csv(folder, version):
    records = folder.parent / "records.jsonl"
    write(records, comparison() if version == "old" else [record()])
    export(records, folder / "runs.csv", curves=True)


def make_figures(folder, version):
    figure = Figure(figsize=(1, 1))
    figure.text(0, 0, version)
    figures.save(figure, folder / "curves")


def make_page(folder, version):
    writing._write(folder / "report.html", version * 5000)


def make_toml(folder, version):
    write_toml(folder / "best.toml", {"data": {"name": version * 5000}}, remarks=[])


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("make", [make_csv, make_figures, make_page, make_toml])
def test_every_failure_leaves_whole_files(tmp_path, make):
    out = tmp_path / "out"
    out.mkdir()
    made = {}
    for version in ("old", "new", "old"):
        with FaultyFiles(out) as files:
            make(out, version)
        made[version] = contents(out)
    assert made["old"] != made["new"]
    for fault in faults(files.operations, KINDS):
        with FaultyFiles(out, fault), pytest.raises(NotWritten, match="cannot be written"):
            make(out, "new")
        found = contents(out)
        assert list(found) == list(made["old"]), fault  # and nothing beside them
        for name, content in found.items():
            assert content in (made["old"][name], made["new"][name]), (fault, name)
    make(out, "new")
    assert contents(out) == made["new"]


def test_what_a_link_leads_to_is_written_as_it_is(tmp_path):
    """A rename would put a file in the place of /dev/stdout."""
    target, link = tmp_path / "target.csv", tmp_path / "runs.csv"
    target.write_text("old")
    link.symlink_to(target)
    make_csv(tmp_path, "new")
    assert link.is_symlink()
    assert target.read_text().startswith("data,model")
