"""Misspelt names and impossible requests are one clear sentence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rootfree_lab import models
from rootfree_lab.config import needed

IMAGES = SimpleNamespace(kind="images", classes=10, shape=(3, 32, 32))


def test_names_are_all_there():
    wanted = {"resnet34", "resnet50", "vgg16_bn", "densenet121", "swin_tiny", "gcvit_xxtiny",
              "focalnet_tiny_srf", "vit_tiny", "vit_small", "vit_base", "vmamba_tiny", "lstm",
              "gpt", "gat", "gamlp", "linear", "logistic", "small_cnn", "small_vit"}  # fmt: skip
    assert wanted <= set(models.names())


@pytest.mark.parametrize(
    ("name", "data", "options", "message"),
    [
        ("resnet_34", IMAGES, {}, "did you mean 'resnet34'"),
        ("resnet34", IMAGES, {"drop_rat": 0.1}, "did you mean 'drop_rate'"),
        ("gpt", IMAGES, {}, "for data of the kind text, got images"),
        ("gpt", SimpleNamespace(kind="text", classes=9, shape=()), {"width": 5}, "multiple of"),
        ("gcvit_micro", SimpleNamespace(kind="images", classes=2, shape=(3, 28, 28)), {},
         "multiples of 16, got 28x28"),
        ("small_vit", IMAGES, {"patch": 5}, "patch must divide"),
        ("small_vit", IMAGES, {"width": 30, "heads": 4}, "small_vit"),
        ("gamlp", SimpleNamespace(kind="graph", classes=2, shape=(4,)), {"attention": "recursiv"},
         "did you mean 'recursive'"),
    ],
)  # fmt: skip
def test_errors(name, data, options, message):
    with pytest.raises(ValueError, match=message):
        models.build(name, data, **options)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(needed, "find_spec", lambda name: None)
    for name, kind, package in (
        ("gat", "graph", "torch_geometric"),
        ("gamlp", "graph", "torch_geometric"),
        ("small_vit", "images", "timm"),
        ("resnet34", "images", "timm"),
    ):
        said = rf"'{name}' needs {package}: pip install 'rootfree\[lab\]'"
        with pytest.raises(ValueError, match=said):
            models.check(name, SimpleNamespace(kind=kind, classes=2, shape=(4,)), {})
    models.check("small_cnn", SimpleNamespace(kind="images", classes=2, shape=(4,)), {})
