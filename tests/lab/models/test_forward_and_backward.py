"""Every model takes its kind of data, gives scores of the right shape and all gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rootfree_lab import models

IMAGES = ("small_cnn", "small_vit", "resnet_micro", "vgg_micro", "densenet_micro", "swin_micro",
          "gcvit_micro", "focalnet_micro", "vmamba_micro")  # fmt: skip


def images(side: int, channels: int = 3) -> SimpleNamespace:
    return SimpleNamespace(kind="images", classes=5, shape=(channels, side, side))


def trains(model: torch.nn.Module, shape: tuple[int, ...], *inputs: torch.Tensor) -> None:
    outputs = model(*inputs)
    assert outputs.shape == shape
    outputs.square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert p.grad.isfinite().all(), name


@pytest.mark.parametrize("name", IMAGES)
def test_small_images(name):
    torch.manual_seed(0)
    trains(models.build(name, images(32)), (2, 5), torch.randn(2, 3, 32, 32))


@pytest.mark.parametrize("name", ["resnet_micro", "vgg_micro", "densenet_micro", "swin_micro",
                                  "gcvit_micro", "focalnet_micro", "vmamba_micro"])  # fmt: skip
def test_large_images_keep_the_original_stem(name):
    torch.manual_seed(0)
    trains(models.build(name, images(128)), (2, 5), torch.randn(2, 3, 128, 128))


@pytest.mark.parametrize(("name", "side"), [("small_cnn", 8), ("small_vit", 8), ("small_vit", 28),
                                            ("resnet_micro", 28), ("swin_micro", 28)])  # fmt: skip
def test_grey_images_of_other_sizes(name, side):
    trains(models.build(name, images(side, 1)), (2, 5), torch.randn(2, 1, side, side))


@pytest.mark.parametrize("name", ["lstm_micro", "gpt_micro"])
def test_language_models(name):
    data = SimpleNamespace(kind="text", classes=11, shape=())
    trains(models.build(name, data), (2, 7, 11), torch.randint(11, (2, 7)))


def test_tied_lstm_shares_the_embedding():
    data = SimpleNamespace(kind="text", classes=11, shape=())
    model = models.build("lstm", data, embedding=4, hidden=6, dropout=0.5)
    assert model.decoder.weight is model.embedding.weight
    trains(model, (2, 7, 11), torch.randint(11, (2, 7)))


def test_gpt_sees_the_past_only():
    torch.manual_seed(0)
    model = models.build("gpt_micro", SimpleNamespace(kind="text", classes=11, shape=()))
    tokens = torch.randint(11, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_gpt_knows_the_order():
    torch.manual_seed(0)
    data = SimpleNamespace(kind="text", classes=11, shape=())
    model = models.build("gpt_micro", data, depth=1)
    # In one block without positions, earlier tokens could trade places unseen by the last.
    swapped = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 1, 3]])
    assert not torch.allclose(model(swapped[0])[:, -1], model(swapped[1])[:, -1], atol=1e-6)


@pytest.mark.parametrize("name", ["linear", "logistic", "mlp"])
@pytest.mark.parametrize("kind", ["tabular", "images"])
def test_models_of_features(name, kind):
    shape = (6,) if kind == "tabular" else (1, 2, 3)
    data = SimpleNamespace(kind=kind, classes=3, shape=shape)
    trains(models.build(name, data), (4, 3), torch.randn(4, *shape))


def test_regression_has_one_output():
    data = SimpleNamespace(kind="tabular", classes=0, shape=(6,))
    assert models.build("linear", data)(torch.randn(4, 6)).shape == (4, 1)
    with pytest.raises(ValueError, match="take 'linear'"):
        models.build("logistic", data)


@pytest.mark.parametrize("options", [{}, {"attention": "recursive"}])
def test_graph_mlp(options):
    data = SimpleNamespace(kind="graph", classes=3, shape=(6,))
    model = models.build("gamlp", data, hidden=8, hops=2, dropout=0.1, **options)
    edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    trains(model, (5, 3), torch.rand(5, 6), edges)


def test_graph_attention():
    data = SimpleNamespace(kind="graph", classes=3, shape=(6,))
    edges = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    trains(models.build("gat", data), (5, 3), torch.rand(5, 6), edges)


def test_bf16_autocast_keeps_the_scan_in_float32():
    torch.manual_seed(0)
    model, x = models.build("vmamba_micro", images(16)), torch.randn(2, 3, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(x)
    outputs.float().sum().backward()
    assert torch.allclose(outputs.float(), model(x), atol=0.1)
