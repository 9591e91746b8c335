"""The shim declares operators only where torchvision cannot be imported without."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch

from rootfree_lab import torchvision_shim


@pytest.fixture(autouse=True)
def fresh():
    torchvision_shim.make_importable.cache_clear()
    yield
    torchvision_shim.make_importable.cache_clear()


@pytest.mark.slow
def test_timm_imports():
    code = (
        "from rootfree_lab.torchvision_shim import make_importable\n"
        "make_importable(); make_importable()\n"
        "import torchvision, timm\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_no_effect_where_torchvision_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setattr(torch.library, "Library", None)  # would be called to declare
    assert torchvision_shim.make_importable() is False


def test_the_missing_operators_are_declared_once(monkeypatch):
    declared = []
    missing = RuntimeError("operator torchvision::nms does not exist")
    outcomes = [missing, types.ModuleType("torchvision")]

    def import_module(name):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(torchvision_shim.importlib, "import_module", import_module)
    monkeypatch.setattr(torchvision_shim.torch, "ops", types.SimpleNamespace(torchvision=object()))
    library = types.SimpleNamespace(define=declared.append)
    monkeypatch.setattr(torchvision_shim, "_library", lambda: library)
    assert torchvision_shim.make_importable() is True
    assert [schema.partition("(")[0] for schema in declared] == ["nms", "qnms"]
    assert torchvision_shim.make_importable() is True
    assert len(declared) == 2


def test_other_errors_are_not_hidden(monkeypatch):
    def broken(name):
        raise RuntimeError("something else")

    monkeypatch.setattr(torchvision_shim.importlib, "import_module", broken)
    with pytest.raises(RuntimeError, match="something else"):
        torchvision_shim.make_importable()
