"""Which optimizer gets which parameters, and what `--set` makes of the line-up."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rootfree
from rootfree_lab.bench.first_try.entrants import NAMES, PEERS, Entrant, available, build, line_up
from rootfree_lab.bench.first_try.lora import LoRALinear


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def lrs(entrant: Entrant, model: nn.Module) -> dict[str, float]:
    """The learning rate of each parameter; every one must have exactly one."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = [
        (names[id(p)], group["lr"])
        for optimizer in build(entrant, model, batch_size=16)
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    assert len(found) == len(dict(found)) == len(names)
    return dict(found)


@pytest.mark.parametrize("name", [n for n in NAMES if available(n)])
def test_every_parameter_is_trained_once(name):
    model = network()
    optimizers = build(Entrant(name), model, batch_size=16)
    before = [p.clone() for p in model.parameters()]
    for step in range(2):
        torch.manual_seed(step)
        nn.functional.cross_entropy(model(torch.randn(16, 4)), torch.arange(16) % 3).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert all((p != old).any() for p, old in zip(model.parameters(), before, strict=True))
    lrs(Entrant(name), network())


@pytest.mark.parametrize("name", ["IFShampoo", "RFShampoo", "Muon"])
def test_a_matrix_method_has_hidden_matrices_and_adamw_the_rest(name):
    given = lrs(Entrant(name, {"lr": 7e-4, "companion_lr": 2e-3}), network())
    assert {key for key, lr in given.items() if lr == 7e-4} == {"0.weight", "2.weight"}
    assert {key for key, lr in given.items() if lr == 2e-3} == {
        "0.bias", "2.bias", "4.weight", "4.bias",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["IFShampoo", "RFShampoo", "Muon"])
def test_the_only_matrix_of_a_model_is_not_left_to_adamw(name):
    given = lrs(Entrant(name, {"lr": 7e-4}), nn.Linear(3, 2))
    _, vectors = rootfree.parameter_groups(nn.Linear(3, 2))
    assert given == {"weight": 7e-4, "bias": 1e-3 if name == "Muon" else vectors["lr"]}


def test_a_record_tells_what_adamw_has():
    """So that a run with other options is another run."""
    plain, faster = Entrant("IFShampoo"), Entrant("IFShampoo", {"companion_precond_lr": 0.25})
    (vectors,) = rootfree.parameter_groups(nn.LayerNorm(2))
    assert plain.effective()["companion_lr"] == vectors["lr"]
    assert plain.effective()["companion_betas"] == [*vectors["betas"]]
    assert faster.effective() != plain.effective()
    (optimizer,) = build(faster, network(), batch_size=16)
    assert {g["betas"] for g in optimizer.param_groups if "companion" in g} == {(0.9, 0.75)}


def test_low_rank_pairs_are_hidden_matrices():
    layer = LoRALinear(nn.Linear(6, 5), rank=4)
    (optimizer,) = build(Entrant("IFShampoo", {"lr": 7e-4}), layer, batch_size=16)
    assert {g["lr"] for g in optimizer.param_groups for _ in g["params"]} == {7e-4}


def test_several_values_are_all_combinations():
    field = line_up(["IFShampoo"], ["IFShampoo.lr=1e-3,3e-3", "IFShampoo.max_update_rms=none,0.1"])
    assert [e.label for e in field] == [
        "IFShampoo lr=0.001 max_update_rms=None", "IFShampoo lr=0.001 max_update_rms=0.1",
        "IFShampoo lr=0.003 max_update_rms=None", "IFShampoo lr=0.003 max_update_rms=0.1",
    ]  # fmt: skip
    assert field[3].effective()["max_update_rms"] == 0.1


def test_lists_and_dtypes_are_one_value():
    field = line_up(["RFAdamW"], ["RFAdamW.betas=[0.8, 0.9]", "RFAdamW.state_dtype=bfloat16"])
    (entrant,) = field
    assert entrant.given == {"betas": (0.8, 0.9), "state_dtype": "bfloat16"}
    assert entrant.effective()["state_dtype"] == "torch.bfloat16"


def test_the_default_line_up_has_everything():
    labels = [entrant.label for entrant in line_up([], [])]
    assert labels[:3] == ["AdamW", "SGD", "Muon"]
    assert {*NAMES} - {*PEERS} <= {*labels}
    assert not {*PEERS} & {*labels}  # of other packages: by name only
    assert [entrant.label for entrant in line_up(["SOAP"], [])] == ["SOAP"]
    assert {"RFFullAdagrad gamma=1", "IFFullAdagrad gamma=1"} <= set(labels)
