"""`make audit`: licences, vulnerabilities, hashes."""

from __future__ import annotations

import io
import json
from importlib.metadata import PackageMetadata
from pathlib import Path

import pytest

import tool_scripts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def audit():
    return tool_scripts.load("audit")


def test_every_installed_package_has_an_allowed_licence(audit):
    assert audit.licences() == []


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("MIT", True),
        ("Apache-2.0 WITH LLVM-exception AND (BSD-3-Clause OR MIT)", True),
        ("GPL-3.0-only OR MIT", True),
        ("GPL-3.0-only", False),
        ("MIT AND AGPL-3.0-or-later", False),
        ("LGPL-2.1", False),
        ("", False),
    ],
)
def test_licences(audit, text, allowed):
    assert audit.is_allowed(text) is allowed


def test_where_a_licence_is_looked_for(audit):
    def of(text) -> PackageMetadata:
        from email import message_from_string

        return message_from_string(text)

    classifier = "Classifier: License :: OSI Approved :: BSD License\nLicense: long text\n"
    assert audit.licence(of("License-Expression: MIT\n" + classifier)) == "MIT"
    assert audit.licence(of(classifier)) == "BSD License"
    assert audit.licence(of("License: Apache-2.0\n")) == "Apache-2.0"
    assert audit.licence(of("Name: x\n")) == ""


def test_the_lock_is_of_the_constraints(audit):
    """After a change of constraints.txt: make lock."""
    assert audit.lock_differences() == []
    assert all(len(hashes) > 0 for _, hashes in audit.locked().values())


def test_differences_of_the_lock_are_named(audit, tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "LOCK", tmp_path / "lock")
    digest = "a" * 64
    audit.LOCK.write_text(f"rich==0.1 \\\n    --hash=sha256:{digest}\nother==2\n")
    found = audit.lock_differences()
    assert "rich: constraints.txt has 15.0.0, constraints.lock 0.1" in found
    assert len(found) == len(audit.pinned())


def test_vulnerabilities_are_named(audit, monkeypatch):
    asked = []

    def answer(request, timeout):
        asked.extend(json.loads(request.data)["queries"])
        return io.BytesIO(b'{"results": [{}, {"vulns": [{"id": "X-1"}, {"id": "X-2"}]}]}')

    monkeypatch.setattr(audit.urllib.request, "urlopen", answer)
    assert audit.vulnerabilities([("b", "2"), ("a", "1")]) == ["b 2: X-1, X-2"]
    assert [query["package"]["name"] for query in asked] == ["a", "b"]


def test_without_the_database_it_says_so(audit, monkeypatch, capsys):
    def refuse(request, timeout):
        raise audit.urllib.error.URLError("no network")

    monkeypatch.setattr(audit.urllib.request, "urlopen", refuse)
    assert audit.main([]) == 0
    assert "not checked, the database cannot be reached" in capsys.readouterr().out
