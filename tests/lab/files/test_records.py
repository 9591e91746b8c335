"""The records file, under many writers and after accidents."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading

import pytest
from filelock import FileLock

from rootfree_lab.files.records import append_record, read_records


def write_many(path, writer, count):
    for i in range(count):
        append_record(path, {"writer": writer, "i": i, "long": "x" * 20_000})


def test_concurrent_writers_leave_valid_lines(tmp_path):
    path = tmp_path / "records.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, w, 15)) for w in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = path.read_text().splitlines()
    found = sorted((r["writer"], r["i"]) for r in map(json.loads, lines))
    assert found == [(w, i) for w in range(4) for i in range(15)]


def test_a_writer_waits_for_the_lock(tmp_path):
    path = tmp_path / "records.jsonl"
    writer = threading.Thread(target=append_record, args=(path, {"a": 1}))
    with FileLock(f"{path}.lock"):
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        assert read_records(path) == []
    writer.join(10)
    assert read_records(path) == [{"a": 1}]


def test_numbers_that_json_has_not_become_null(tmp_path):
    path = tmp_path / "new folder" / "records.jsonl"
    append_record(path, {"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (1,)}})
    assert read_records(path) == [{"a": None, "b": [None, 1.5], "c": {"d": [1]}}]


@pytest.mark.parametrize(("tail", "kept"), [(b'{"half": ', []), (b'{"whole": 1}', [{"whole": 1}])])
def test_a_last_line_without_an_end(tmp_path, tail, kept):
    path = tmp_path / "records.jsonl"
    append_record(path, {"first": 0})
    with open(path, "ab") as file:
        file.write(tail)
    assert read_records(path) == [{"first": 0}, *kept]
    append_record(path, {"next": 2})
    assert read_records(path) == [{"first": 0}, *kept, {"next": 2}]


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    append_record(path, {"first": 0})
    before = path.read_bytes()

    def full(handle):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        append_record(path, {"second": 1})
    assert path.read_bytes() == before


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"b": 1}\n')
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2"):
        read_records(path)
