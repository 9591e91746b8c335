"""Who gets what: the roles of parameters in models of many kinds, and the groups made of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import rootfree
from rootfree.layout.tiles import cut
from rootfree.shell.parameter_groups import _packed_block_size
from rootfree_lab.torchvision_shim import make_importable


def roles(model: nn.Module, **options) -> dict[str, str]:
    """Names of the trainable matrices with their roles; vectors and scalars are checked here."""
    found = {}
    for group in rootfree.parameter_groups(model, **options):
        for name, p in group["params"]:
            if group["role"] in ("vector", "scalar"):
                assert sum(d > 1 for d in p.shape) < 2
                assert group["companion"] == "adamw"
            else:
                found[name] = group["role"]
                hidden = group["role"] in ("hidden", "adapter", "attention q, k, v")
                assert ("companion" in group) != hidden
    return found


def hidden(model: nn.Module) -> set[str]:
    return {name for name, role in roles(model).items() if role == "hidden"}


class Attention(nn.Module):
    """A pre-norm block, in timm's and GPT's way."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)


class Transformer(nn.Module):
    """ViT with a patch embedding, or GPT without."""

    def __init__(self, d: int, *, vocabulary: int = 0, tied: bool = False, head: bool = True):
        super().__init__()
        if vocabulary:
            self.embedding = nn.Embedding(vocabulary, d)
        else:
            self.patches = nn.Conv2d(3, d, 4, stride=4)
            self.cls_token = nn.Parameter(torch.zeros(1, 1, d))
        self.positions = nn.Parameter(torch.zeros(1, 9, d))
        self.blocks = nn.ModuleList(Attention(d) for _ in range(2))
        self.norm = nn.LayerNorm(d)
        if head:
            self.head = nn.Linear(d, vocabulary or 10)
        if tied:
            self.head.weight = self.embedding.weight


IN_BLOCKS = {f"blocks.{i}.{name}.weight" for i in range(2) for name in ("qkv", "proj")}


def test_vision_transformer():
    found = roles(Transformer(8))
    assert {name for name, role in found.items() if role == "hidden"} == {
        "patches.weight",
        *IN_BLOCKS,
    }
    assert (found["positions"], found["head.weight"]) == ("free parameter", "head")


def test_language_models():
    found = roles(Transformer(8, vocabulary=20))
    assert {name for name, role in found.items() if role == "hidden"} == IN_BLOCKS
    assert (found["embedding.weight"], found["head.weight"]) == ("embedding", "head")
    found = roles(Transformer(8, vocabulary=20, tied=True))
    assert found["embedding.weight"] == "embedding and head"
    assert "head.weight" not in found


def test_of_a_shared_weight_the_embedding_counts_and_then_the_layer():
    model = nn.ModuleDict({"head": nn.Linear(4, 9), "body": nn.GRU(4, 4), "end": nn.Identity()})
    model["embedding"] = nn.Embedding(9, 4)
    model["embedding"].weight = model["head"].weight  # a name that comes later
    assert roles(model)["head.weight"] == "embedding"
    model.shared = model["body"].weight_hh_l0  # a name that comes first
    assert roles(model)["shared"] == "hidden"


def test_a_trunk_has_no_head():
    assert hidden(Transformer(8, head=False)) == {"patches.weight", *IN_BLOCKS}
    assert "head" not in roles(nn.Transformer(8, 2, 2, 2, 16, batch_first=True)).values()
    assert hidden(nn.LSTM(4, 5, num_layers=2)) == {
        f"weight_{kind}_l{layer}" for kind in ("ih", "hh") for layer in (0, 1)
    }


def test_convolutional_networks():
    resnet = nn.Sequential(nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    resnet.add_module("fc", nn.Linear(4, 10))
    assert roles(resnet) == {"0.weight": "hidden", "2.weight": "hidden", "fc.weight": "head"}
    classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 10))
    vgg = nn.ModuleDict({"features": nn.Sequential(nn.Conv2d(3, 8, 3)), "classifier": classifier})
    assert hidden(vgg) == {"features.0.weight", "classifier.0.weight"}
    fully = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1))
    assert roles(fully) == {"0.weight": "hidden", "1.weight": "head"}


def test_recurrent_language_model():
    model = nn.ModuleDict(
        {"encoder": nn.Embedding(20, 4), "rnn": nn.LSTM(4, 6), "decoder": nn.Linear(6, 20)}
    )
    assert hidden(model) == {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}
    assert roles(model)["decoder.weight"] == "head"
    # what comes after the last linear layer is no head, and then that layer is none either
    assert "head" not in roles(nn.Sequential(nn.Linear(3, 4), nn.GRU(4, 5))).values()


def test_layers_of_other_packages():
    class Linear(nn.Module):  # PyTorch Geometric's; Conv1D of transformers is alike
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(b, a)), nn.Parameter(torch.ones(b))

    class GraphAttention(nn.Module):
        def __init__(self, a: int, b: int) -> None:
            super().__init__()
            self.att_src = nn.Parameter(torch.ones(1, 2, b))
            self.lin = Linear(a, 2 * b)

    model = nn.ModuleDict({"first": GraphAttention(5, 4), "second": GraphAttention(8, 3)})
    assert roles(model) == {
        "first.lin.weight": "hidden",
        "first.att_src": "free parameter",
        "second.lin.weight": "head",
        "second.att_src": "free parameter",
    }


def test_gpt2_of_transformers():
    transformers = pytest.importorskip("transformers")
    make_importable()  # torchvision, which its models import
    config = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=20, n_positions=6)
    found = roles(transformers.GPT2LMHeadModel(config))
    assert found["transformer.wte.weight"] == "embedding and head"
    assert found["transformer.wpe.weight"] == "embedding"
    assert {role for name, role in found.items() if ".h." in name} == {"hidden"}


def test_the_only_matrix_goes_to_the_matrix_method():
    assert roles(nn.Linear(4, 3)) == {"weight": "hidden"}
    assert roles(nn.Linear(4, 1)) == {"weight": "hidden"}  # least squares
    assert roles(nn.Sequential(nn.EmbeddingBag(9, 4), nn.Linear(4, 3)))["1.weight"] == "hidden"
    model = Transformer(8)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    assert roles(model) == {"head.weight": "hidden"}
    mlp = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert roles(mlp) == {"0.weight": "hidden", "2.weight": "head"}


def test_stacked_layers_are_hidden_and_a_table_of_three_axes_is_not():
    class Stack(nn.Module):
        def __init__(self, **shapes: tuple[int, ...]) -> None:
            super().__init__()
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    experts = Stack(up=(4, 16, 6), down=(4, 6, 16), up_bias=(4, 16))
    others = (
        Stack(at=(3, 5, 6)),
        Stack(rows=(3, 5, 6), columns=(5, 3, 6)),
        Stack(a=(1, 5, 6), b=(1, 6, 5)),
    )
    found = roles(nn.Sequential(nn.Linear(6, 6), experts, *others, nn.Linear(6, 3)))
    free = {name for name, role in found.items() if role == "free parameter"}
    assert free == {"1.up_bias", "2.at", "3.rows", "3.columns", "4.a", "4.b"}
    assert {found[name] for name in ("0.weight", "1.up", "1.down")} == {"hidden"}


def test_matrices_that_no_layer_owns_go_to_the_matrix_method_where_there_are_no_others():
    class ByHand(nn.Module):
        def __init__(self, *shapes: tuple[int, ...]) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.ones(shape) for shape in shapes)

    assert roles(ByHand((9, 4), (7, 4))) == {"weights.0": "hidden", "weights.1": "hidden"}
    layers = nn.Sequential(nn.Embedding(9, 4), ByHand((4, 8), (1, 8)), nn.Linear(8, 3))
    found = {"0.weight": "embedding", "1.weights.0": "hidden", "2.weight": "head"}
    assert roles(layers) == found
    # a prompt before frozen layers is a table
    tuned = nn.Sequential(ByHand((5, 4)), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3))
    assert roles(tuned) == {"0.weights.0": "free parameter", "2.weight": "hidden"}


class LoRA(nn.Module):
    """Low-rank updates as modules (peft) or as bare parameters."""

    def __init__(self, base: nn.Linear, *, bare: bool) -> None:
        super().__init__()
        base.requires_grad_(False)
        self.base, (o, i) = base, base.weight.shape
        if bare:
            self.A, self.B = nn.Parameter(torch.ones(i, 2)), nn.Parameter(torch.ones(2, o))
        else:
            self.A = nn.ModuleDict({"default": nn.Linear(i, 2, bias=False)})
            self.B = nn.ModuleDict({"default": nn.Linear(2, o, bias=False)})


@pytest.mark.parametrize("bare", [True, False])
def test_lora(bare):
    model = nn.Sequential(*[LoRA(nn.Linear(a, b), bare=bare) for a, b in ((6, 8), (8, 5))])
    end = "" if bare else ".default.weight"
    adapters = {f"{i}.{name}{end}": "adapter" for i in (0, 1) for name in "AB"}
    assert roles(model) == adapters  # the last B is no head
    model.append(nn.Linear(5, 3))
    assert roles(model) == {**adapters, "2.weight": "head"}


def test_norms_over_several_axes_and_parametrised_weights():
    model = nn.Sequential(
        nn.LayerNorm((3, 4)),
        parametrizations.weight_norm(nn.Linear(4, 5)),
        parametrizations.spectral_norm(nn.Linear(5, 6)),
        nn.Linear(6, 2),
    )
    assert roles(model) == {
        "0.weight": "norm",
        "0.bias": "norm",
        "1.parametrizations.weight.original1": "hidden",
        "2.parametrizations.weight.original": "hidden",
        "3.weight": "head",
    }


# --- packed attention ---------------------------------------------------------------------------


def test_packed_attention_has_blocks_for_q_k_and_v():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    groups = rootfree.parameter_groups(nn.Sequential(layer, nn.Linear(32, 5)))
    (packed,) = [group for group in groups if group["role"] == "attention q, k, v"]
    assert packed["block_size"] == 32
    summary = rootfree.IFShampoo(groups, batch_size=2).summary()
    assert "3 of dense 32 x dense 32" in summary


@settings(deadline=None)
@given(st.integers(1, 20_000))
def test_a_packed_weight_is_cut_at_its_parts_or_left_alone(d):
    size = _packed_block_size(d)
    if size is None:
        assert d > 64  # where blocks are multiples of 16, and d is none or has no such divisor
    else:
        assert size <= 1024
        assert cut(3 * d, size) == [(0, 3 * d // size, size)]
        assert d % size == 0
    if d <= 1024 and d % 16 == 0:
        assert size == d


# --- groups -------------------------------------------------------------------------------------


def test_options_go_where_they_belong():
    groups = rootfree.parameter_groups(
        Transformer(8), lr=0.25, companion_lr=0.5, weight_decay=0.125
    )
    for group in groups:
        assert group["lr"] == (0.5 if "companion" in group else 0.25)
        assert group["weight_decay"] == (0.0 if group["role"] == "vector" else 0.125)
    optimizer = rootfree.IFShampoo(groups, batch_size=4)
    assert optimizer.param_groups[0]["param_names"][0] == "patches.weight"
    everywhere = rootfree.parameter_groups(
        Transformer(8), weight_decay=0.125, no_decay_on_vectors=False
    )
    assert {group["weight_decay"] for group in everywhere} == {0.125}


def test_without_options_the_optimizers_hold_but_for_the_rates_of_adamw():
    groups = rootfree.parameter_groups(
        Transformer(8, vocabulary=20), overrides={"embedding": {"betas": (0.5, 0.75)}}
    )
    optimizer = rootfree.IFShampoo(groups, batch_size=4, lr=0.75, weight_decay=0.5)
    for group in optimizer.param_groups:
        assert group["lr"] == (2e-3 if "companion" in group else 0.75)
        if "companion" in group:
            assert group["betas"] == ((0.5, 0.75) if group["role"] == "embedding" else (0.9, 0.95))
        assert group["weight_decay"] == (0.0 if group["role"] == "vector" else 0.5)


def test_without_a_companion():
    """Two groups for any method: embeddings, with a diagonal factor, and all others."""
    model = Transformer(8, vocabulary=20, tied=True)
    rest, embeddings = rootfree.parameter_groups(model, companion=None)
    assert rest.keys() == {"params"}
    assert [name for name, _ in embeddings["params"]] == ["embedding.weight"]
    assert embeddings["structure"] == ("diagonal", "dense")
    assert "companion" not in embeddings
    for method in (rootfree.IFShampoo, rootfree.RFShampoo, rootfree.RFRMSprop):
        groups = rootfree.parameter_groups(model, companion=None)
        method(groups, batch_size=4)
    decayed = rootfree.parameter_groups(model, companion=None, weight_decay=0.5)
    assert sorted(group["weight_decay"] for group in decayed) == [0.0, 0.5, 0.5]
    with pytest.raises(ValueError, match=r"parameter_groups\(model, companion=None\)"):
        rootfree.RFRMSprop(rootfree.parameter_groups(model), batch_size=4)


def group_of(name: str, groups: list[dict]) -> dict:
    (found,) = [group for group in groups if name in dict(group["params"])]
    return found


def test_overrides():
    model = Transformer(8, vocabulary=20, tied=True)
    overrides = {
        "head": {"companion": None},  # a second name of the embedding
        "blocks.1": {"companion": "adamw", "lr": 0.5},
        "blocks.1.qkv.weight": {"lr": 0.25},
        nn.LayerNorm: {"weight_decay": 0.125, "role": "normalisation"},
        Attention: {"lr": 2.0},
    }
    groups = rootfree.parameter_groups(model, companion_lr=1.0, overrides=overrides)
    embedding = group_of("embedding.weight", groups)
    assert "companion" not in embedding
    assert embedding["structure"] == ("diagonal", "dense")
    assert group_of("blocks.0.proj.weight", groups)["lr"] == 2.0
    proj, qkv = (group_of(f"blocks.1.{name}.weight", groups) for name in ("proj", "qkv"))
    assert (proj["companion"], proj["lr"], qkv["lr"]) == ("adamw", 0.5, 0.25)
    norm = group_of("norm.weight", groups)
    assert (norm["lr"], norm["weight_decay"], norm["role"]) == (1.0, 0.125, "normalisation")
    rootfree.IFShampoo(groups, batch_size=2)


layers = st.sampled_from(
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.Linear(4, 1),
        lambda: nn.Embedding(7, 4),
        lambda: nn.Conv1d(4, 4, 3),
        lambda: nn.GRU(4, 4),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.LayerNorm(4),
        lambda: nn.PReLU(),
        lambda: nn.ParameterList([torch.ones(3, 4), torch.ones(())]),
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)),
    ]
)


@settings(deadline=None, max_examples=40)
@given(st.lists(layers, min_size=1, max_size=6), st.data())
def test_every_trainable_parameter_is_in_one_group_and_an_optimizer_takes_them(makers, data):
    model = nn.Sequential(*[make() for make in makers])
    for p in list(model.parameters())[1:]:
        p.requires_grad_(data.draw(st.booleans()))
    groups = rootfree.parameter_groups(model)
    held = [name for group in groups for name, _ in group["params"]]
    assert sorted(held) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    assert all(a != b for i, a in enumerate(options) for b in options[:i])
    optimizer = rootfree.IFShampoo(groups, batch_size=2)
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_compiled_model_is_looked_through():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    compiled = torch.compile(model)
    assert roles(compiled) == roles(model)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"companion": "sgd"}, "companion must be one of None, 'adamw'; got 'sgd'"),
        ({"lr": -1.0}, r"lr must be in \[0, inf\), got -1.0"),
        ({"companion_lr": math.nan}, r"companion_lr must be in \[0, inf\), got nan"),
        ({"weight_decay": "0.1"}, "weight_decay must be a real number, got '0.1'"),
        ({"no_decay_on_vectors": 1}, "no_decay_on_vectors must be True or False, got 1"),
        ({"overrides": ["head"]}, "overrides must be a mapping, got list"),
        ({"overrides": {"haed": {}}}, r"overrides\['haed'\] must name.*did you mean 'head'"),
        ({"overrides": {nn.GRU: {}}}, r"overrides\['GRU'\] must name trainable parameters"),
        ({"overrides": {"blocks.0": {}}}, r"overrides\['blocks.0'\] must name trainable"),
        ({"overrides": {3: {}}}, r"overrides\[3\] must be a name or a type of modules, got int"),
        ({"overrides": {dict: {}}}, "must be a name or a type of modules, got type"),
        ({"overrides": {"head": 0.1}}, r"overrides\['head'\] must be a dict of options, got 0.1"),
        ({"overrides": {"head": {"params": []}}}, r"\['head'\] must have options alone"),
        ({"overrides": {"head": {"companion": "x"}}}, r"companion in overrides\['head'\] must be"),
    ],
)
def test_bad_arguments(arguments, message):
    model = Transformer(8)
    model.blocks[0].requires_grad_(False)
    with pytest.raises((TypeError, ValueError), match=message):
        rootfree.parameter_groups(model, **arguments)


def test_bad_models():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got list"):
        rootfree.parameter_groups([torch.ones(2)])
    with pytest.raises(ValueError, match="must have parameters, but this ReLU has none"):
        rootfree.parameter_groups(nn.ReLU())
    with pytest.raises(ValueError, match="all 2 are frozen, weight for one"):
        rootfree.parameter_groups(nn.Linear(3, 2).requires_grad_(False))
    with pytest.raises(ValueError, match=r"parameter 0\.weight has no shape yet"):
        rootfree.parameter_groups(nn.Sequential(nn.LazyLinear(3)))
