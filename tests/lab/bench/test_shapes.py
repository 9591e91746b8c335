"""The parameter sets are those of the models they are named after."""

from __future__ import annotations

import math

import pytest

from rootfree_lab.bench.model import build_model
from rootfree_lab.bench.shapes import SHAPE_SETS, gpt1b, resnet34, shapes_of, tiny, vit_b
from rootfree_lab.config.reading import ConfigError


def total(shapes) -> int:
    return sum(math.prod(shape) for shape in shapes)


@pytest.mark.parametrize(
    ("shapes", "millions"), [(vit_b(), 86.4), (gpt1b(), 822), (resnet34(), 21.3)]
)
def test_totals(shapes, millions):
    digits = 1 if millions < 100 else 0
    assert round(total(shapes) / 1e6, digits) == millions


def test_resnet34_is_timms():
    from rootfree_lab.torchvision_shim import make_importable

    make_importable()
    import timm

    model = timm.create_model("resnet34", num_classes=100)
    assert sorted(tuple(p.shape) for p in model.parameters()) == sorted(resnet34())
    assert any(len(shape) == 4 for shape in resnet34())


def test_vit_b_is_timms_but_for_its_tables():
    """The class token and the positions are left out, and so is nothing else."""
    theirs = [
        tuple(p.shape) for p in build_model("vit_base_patch16_224", "--model").model.parameters()
    ]
    matrices = [s for s in theirs if len(s) != 3]
    assert sorted(s for s in matrices if len(s) > 1) == sorted(s for s in vit_b() if len(s) > 1)
    assert sorted(matrices) == sorted(vit_b())


def test_gpt1b_has_matrices_and_norms_alone():
    assert len(gpt1b()) == 16 * 9
    assert {len(shape) for shape in gpt1b()} == {1, 2}


def test_tiny_has_every_kind():
    assert {len(shape) for shape in tiny()} == {1, 2, 4}
    assert total(SHAPE_SETS["vit_b_third"]()) < total(vit_b()) / 2.5


def test_an_unknown_set_is_answered_with_the_known_ones():
    with pytest.raises(ConfigError, match="vgg") as error:
        shapes_of("vgg")
    assert all(name in str(error.value) for name in SHAPE_SETS)


@pytest.mark.parametrize("name", ["small_cnn", "gpt_micro", "mlp", "lstm_micro", "resnet_micro"])
def test_models_of_the_laboratory_come_with_inputs(name):
    import torch

    synthetic = build_model(name, "--model")
    x, y = synthetic.draw(3, torch.device("cpu"))
    scores = synthetic.model(x)
    assert scores.shape[:-1] == y.shape
    assert int(y.max()) < scores.shape[-1]


def test_models_that_need_more_than_numbers_are_refused():
    with pytest.raises(ConfigError, match=r"--model: the model 'gat' needs a graph"):
        build_model("gat", "--model")
    with pytest.raises(ConfigError, match=r"--iteration.*'no_such_model'.*small_cnn"):
        build_model("no_such_model", "--iteration")
