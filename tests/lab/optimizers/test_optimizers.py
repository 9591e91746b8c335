"""The registry: every method trains, options are checked, parameters go where they belong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

import rootfree
from rootfree_lab import models, optimizers
from rootfree_lab.optimizers import building
from rootfree_lab.optimizers.roles import split_parameters

INSTALLED = [name for name in optimizers.names() if optimizers.available(name)]

# Step sizes at which three steps on one batch go down; zero-initialised AdaGrad divides by the
# squared gradients of the first batch alone.
OPTIONS = {
    "SGD": {"lr": 0.1},
    "RMSprop": {"lr": 1e-3},
    "Shampoo": {"lr": 1e-3},
    "RFAdagrad-zero-init": {"lr": 1e-3, "damping": 1e-2},
    "RFFullAdagrad-zero-init": {
        "lr": 0.1,
        "precond_lr": 0.1,
        "momentum": 0.0,
        "damping": 1e-2,
    },
}


def cnn() -> torch.nn.Module:
    torch.manual_seed(0)
    data = SimpleNamespace(kind="images", classes=4, shape=(1, 8, 8))
    return models.build("small_cnn", data, width=4)


def gpt() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.build("gpt_micro", SimpleNamespace(kind="text", classes=16, shape=()))


@pytest.mark.parametrize("name", INSTALLED)
def test_three_steps_lower_the_loss(name):
    model = cnn()
    x, y = torch.randn(16, 1, 8, 8), torch.randint(4, (16,))
    built = optimizers.build(name, model, batch_size=16, **OPTIONS.get(name, {}))
    losses = []
    for _ in range(4):
        for optimizer in built:
            optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        losses.append(loss.item())
        for optimizer in built:
            optimizer.step()
    assert losses[-1] < losses[0]


def test_companion_on_a_gpt():
    matrices, rest = split_parameters(gpt())
    kinds = {name.rpartition(".")[0].rpartition(".")[2] for name, _ in matrices}
    assert kinds == {"qkv", "out", "up", "down"}
    assert len(matrices) == 8
    assert {name for name, _ in rest} >= {"embedding.weight", "head.weight", "norm.weight"}
    assert all(p.dim() == 1 for name, p in rest if name not in ("embedding.weight", "head.weight"))


def test_companion_on_a_cnn():
    matrices, rest = split_parameters(cnn())
    assert [name for name, _ in matrices] == ["0.weight", "2.weight", "6.weight"]
    assert [name for name, _ in rest] == ["0.bias", "2.bias", "6.bias", "8.weight", "8.bias"]
    matrices, _ = split_parameters(cnn(), two_axes=True)
    assert [name for name, _ in matrices] == ["6.weight"]


def test_tables_and_tied_heads_are_not_matrices():
    vit = models.build("small_vit", SimpleNamespace(kind="images", classes=4, shape=(1, 8, 8)))
    _, rest = split_parameters(vit)
    assert {"pos_embed", "cls_token", "head.weight"} <= {name for name, _ in rest}
    text = SimpleNamespace(kind="text", classes=9, shape=())
    _, rest = split_parameters(models.build("lstm", text, embedding=4, hidden=6))
    assert "embedding.weight" in {name for name, _ in rest}
    mamba = models.build("vmamba_micro", SimpleNamespace(kind="images", classes=4, shape=(1, 8, 8)))
    matrices, rest = split_parameters(mamba)
    assert any(name.endswith("A_log") for name, _ in rest)
    assert any(name.endswith("x_proj") for name, _ in matrices)


def test_every_parameter_is_in_one_optimizer():
    for name, options, count in (
        ("Muon", {}, 2),
        ("IFShampoo", {}, 1),
        ("IFShampoo", {"companion": "RFRMSprop", "companion_options": {"lr": 0.5}}, 2),
        ("IFShampoo", {"companion": "AdamW"}, 1),
        ("IFShampoo", {"companion": "AdamW", "companion_options": {"amsgrad": True}}, 2),
        ("Shampoo", {"companion": "AdamW"}, 2),
    ):
        model = gpt()
        built = optimizers.build(name, model, batch_size=8, **options)
        assert len(built) == count
        held = [id(p) for o in built for group in o.param_groups for p in group["params"]]
        assert sorted(held) == sorted(id(p) for p in model.parameters())
        if options.get("companion") == "RFRMSprop":
            assert isinstance(built[1], rootfree.RFRMSprop)
            assert built[1].param_groups[0]["lr"] == 0.5
            assert built[1].batch_size == 8


def test_frozen_parameters_are_left_alone():
    model = cnn()
    model[0].weight.requires_grad_(False)
    (optimizer,) = optimizers.build("AdamW", model, batch_size=8)
    assert all(p is not model[0].weight for p in optimizer.param_groups[0]["params"])


def test_one_vocabulary():
    words = {"lr": 0.5, "momentum": 0.8, "precond_lr": 0.25, "damping": 1e-3}
    (adamw,) = optimizers.build("AdamW", cnn(), batch_size=8, **words)
    assert adamw.defaults["betas"] == (0.8, 0.75)
    assert adamw.defaults["eps"] == 1e-3
    (adamw,) = optimizers.build("AdamW", cnn(), batch_size=8, precond_lr=0.25)
    assert adamw.defaults["betas"] == (0.9, 0.75)
    (rmsprop,) = optimizers.build("RMSprop", cnn(), batch_size=8, **words)
    assert (rmsprop.defaults["alpha"], rmsprop.defaults["momentum"]) == (0.75, 0.8)
    (ours,) = optimizers.build("RFRMSprop", cnn(), batch_size=8, **words)
    assert ours.defaults["precond_lr"] == 0.25
    (ours,) = optimizers.build("RFAdamW", cnn(), batch_size=8, **words)
    assert ours.defaults["betas"] == (0.8, 0.75)
    if optimizers.available("sirfshampoo"):
        (peer,) = optimizers.build("sirfshampoo", cnn(), batch_size=8, riemannian_momentum=0.3)
        assert peer.param_groups[0]["alpha2"] == 0.3


def test_values_of_toml_files():
    (optimizer,) = optimizers.build(
        "IFShampoo",
        cnn(),
        batch_size=8,
        factor_dtype="bfloat16",
        structure={"2": ["dense", "diagonal"]},
    )
    assert optimizer.defaults["factor_dtype"] is torch.bfloat16
    assert "dense 4 x diagonal 9" in optimizer.summary()
    (optimizer,) = optimizers.build("AdamW", cnn(), batch_size=8, betas=[0.5, 0.6])
    assert optimizer.defaults["betas"] == (0.5, 0.6)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("IFShampo", {}, "did you mean 'IFShampoo'"),
        ("IFShampoo", {"dampin": 0.1}, "did you mean 'damping'"),
        ("SGD", {"momentun": 0.1}, "did you mean 'momentum'"),
        ("IFShampoo", {"batchsize": 3}, "'batchsize' is unknown"),
        ("IFShampoo", {"companion_lr": 3}, "'companion_lr' is unknown"),
        ("IFShampoo", {"companion": "AdamQ"}, "did you mean 'AdamW'"),
        ("IFShampoo", {"companion": "Muon"}, "the companion 'Muon' is unknown"),
        ("IFShampoo", {"companion": "AdamW", "companion_options": {"bets": 1}}, "'betas'"),
        ("IFShampoo", {"companion_options": {"lr": 1.0}}, "but companion is 'none'"),
        ("IFShampoo", {"companion": "parameter_groups", "companion_options": {"eps": 1}}, "'eps'"),
        ("Shampoo", {"companion": "parameter_groups"}, "'parameter_groups' is unknown"),
        ("IFShampoo", {"companion": "AdamW", "companion_options": 3}, "must be a table"),
        ("AdamW", {"companion": "RFRMSprop"}, "companion must be 'none'"),
        ("AdamW", {"momentum": 0.5, "betas": (0.9, 0.9)}, "give one of them"),
        ("AdamW", {"lr": -1.0}, "AdamW: Invalid learning rate"),
        ("IFShampoo", {"momentum": 1.0}, r"momentum must be in \[0, 1\)"),
        ("IFShampoo", {"lr": "fast"}, "lr must be a real number"),
        ("IFShampoo", {"factor_dtype": "bf61"}, "name of a torch dtype"),
        ("Muon", {"companion": "none"}, "two axes only"),
    ],
)
def test_errors(name, options, message):
    with pytest.raises(ValueError, match=message):
        optimizers.build(name, cnn(), batch_size=8, **options)


def test_adamw_beside_our_methods_is_a_group_with_the_values_of_torchs():
    options = {"lr": 0.5, "companion": "AdamW", "companion_options": {"precond_lr": 0.25}}
    (optimizer,) = optimizers.build("IFShampoo", gpt(), batch_size=8, **options)
    matrices, *rest = optimizer.param_groups
    assert (matrices["lr"], matrices["weight_decay"]) == (0.5, 0.0)
    torchs = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], betas=(0.9, 0.75))
    for group in rest:
        for name in ("lr", "betas", "eps", "weight_decay"):
            assert group[name] == torchs.defaults[name]


def test_the_groups_of_the_library_are_those_of_its_users():
    options = {"companion": "parameter_groups", "companion_options": {"lr": 0.5}}
    (built,) = optimizers.build("IFWhitening", gpt(), batch_size=8, lr=0.25, **options)
    expected = rootfree.IFWhitening(rootfree.parameter_groups(gpt(), companion_lr=0.5), lr=0.25)
    for mine, theirs in zip(built.param_groups, expected.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {
            k: v for k, v in theirs.items() if k != "params"
        }
    assert {g["weight_decay"] for g in built.param_groups if g["lr"] == 0.5} == {0.0, 0.01}
    options["companion_options"] = {"momentum": 0.8, "precond_lr": 0.25}
    (built,) = optimizers.build("IFWhitening", gpt(), batch_size=8, **options)
    left = [group for group in built.param_groups if "companion" in group]
    assert {(group["lr"], group["betas"]) for group in left} == {(2e-3, (0.8, 0.75))}


def test_a_model_without_matrices_has_nothing_for_a_matrix_method():
    convolution, head = torch.nn.Conv2d(1, 4, 3), torch.nn.Linear(4, 2)
    muon, adamw = optimizers.build("Muon", torch.nn.Sequential(convolution, head), batch_size=8)
    assert muon.param_groups[0]["params"] == [head.weight]  # the only one with two axes
    assert len(adamw.param_groups[0]["params"]) == 3
    with pytest.raises(ValueError, match="no hidden matrices for Muon"):
        optimizers.build("Muon", convolution, batch_size=8)
    with pytest.raises(ValueError, match="no hidden matrices for RFShampoo"):
        optimizers.build("RFShampoo", torch.nn.Embedding(4, 3), batch_size=8, companion="AdamW")


def test_a_torch_without_muon(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    assert not optimizers.available("Muon")
    with pytest.raises(ValueError, match=r"Muon needs torch>=2\.9"):
        optimizers.build("Muon", cnn(), batch_size=8)


def test_a_peer_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(building, "find_spec", lambda name: None)
    assert not optimizers.available("heavyball.SOAP")
    assert optimizers.available("AdamW")
    assert "heavyball.SOAP" in optimizers.names()
    with pytest.raises(ValueError, match="pip install 'heavyball'"):
        optimizers.build("heavyball.SOAP", cnn(), batch_size=8)
    with pytest.raises(ValueError, match="pip install 'heavyball'"):
        optimizers.check("heavyball.SOAP", {})  # before anything is trained


def test_of_graph_attention_the_hidden_map_is_a_matrix():
    pytest.importorskip("torch_geometric")
    model = models.build("gat", SimpleNamespace(kind="graph", classes=7, shape=(20,)))
    matrices, rest = split_parameters(model)
    assert [name for name, _ in matrices] == ["first.lin.weight"]
    assert {"first.att_src", "first.att_dst", "second.lin.weight"} < {name for name, _ in rest}
