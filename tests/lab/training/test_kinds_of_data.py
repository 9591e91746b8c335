"""Runs on text, graphs and regression: the loss terms that B counts, and what is measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rootfree_lab import session
from rootfree_lab.config_files import config_from
from rootfree_lab.config_reading import plain_options
from rootfree_lab.data import Dataset, Graph, Split
from rootfree_lab.feeding import Feed
from rootfree_lab.models import graphs
from rootfree_lab.session import Session
from rootfree_lab.training import train

EMPTY = Split(torch.zeros(0), torch.zeros(0))


def text() -> Dataset:
    tokens = torch.arange(600) % 7  # fully predictable
    split = Split(tokens, torch.zeros(0))
    return Dataset("made-up text", "text", split, split, None, 7, ())


def graph() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 3
    features = torch.nn.functional.one_hot(labels, 5).float()
    labels[30] = -1  # a node without a label, in the test split
    edges = torch.randint(40, (2, 80), generator=generator)
    parts = (torch.arange(0, 20), torch.arange(20, 25), torch.arange(25, 40))
    made = Graph(features, torch.cat([edges, edges.flip(0)], 1), labels, *parts)
    return Dataset("made-up graph", "graph", EMPTY, EMPTY, None, 3, (5,), graph=made)


@pytest.fixture
def made_up(monkeypatch):
    sets = {"made-up text": text, "made-up graph": graph}
    real = session.data.load

    def load(name, **arguments):
        return sets[name]() if name in sets else real(name, **arguments)

    monkeypatch.setattr(session.data, "load", load)
    session._dataset.cache_clear()
    yield
    session._dataset.cache_clear()


def config(data, model, **train_settings):
    return config_from(
        {
            "data": {"name": data},
            "model": model if isinstance(model, dict) else {"name": model},
            "optimizer": {"name": "RFRMSprop", "lr": 1e-2},
            "train": {"batch_size": 4, "device": "cpu", **train_settings},
        }
    )


def test_text(tmp_path, made_up):
    settings = config("made-up text", "gpt_micro", steps=60, context=10, eval_every=20)
    built = Session(settings, torch.device("cpu"))
    # 59 windows of 10 tokens; B counts tokens
    assert len(built.feed) == 14
    assert built.optimizers[0].batch_size == 40
    record = train(settings, out=tmp_path)
    losses = [point["test_loss"] for point in record["curve"]]
    assert losses[-1] < losses[0] < 1.5 * math.log(7)
    assert record["final"]["test_error"] is None
    assert record["curve"][0]["epoch"] == pytest.approx(20 / 14)


def test_text_needs_a_context(made_up):
    with pytest.raises(ValueError, match=r"train\.context must be at least 1"):
        Session(config("made-up text", "gpt_micro", steps=1), torch.device("cpu"))


def test_cuda_graphs_are_not_for_graph_data(made_up):
    """Said before the first step, and on every device."""
    with pytest.raises(ValueError, match=r"train\.graphs must be false for graph data, got true"):
        Session(config("made-up graph", "gamlp", steps=1, graphs=True), torch.device("cpu"))


def test_channels_last_is_for_images(made_up):
    with pytest.raises(ValueError, match=r"train\.channels_last is for images, got true for graph"):
        Session(config("made-up graph", "gamlp", steps=1, channels_last=True), torch.device("cpu"))


def test_graph(tmp_path, made_up):
    model = {"name": "gamlp", "options": {"dropout": 0.0, "hidden": 16}}
    settings = config("made-up graph", model, epochs=30, eval_every=10)
    settings = replace(settings, train=replace(settings.train, batch_size=20))
    built = Session(settings, torch.device("cpu"))
    assert built.optimizers[0].batch_size == 20  # labelled training nodes
    assert sum(len(batch.target) for batch in built.test) == 14  # one of the 15 has no label
    record = train(settings, out=tmp_path)
    assert record["steps"] == 30
    assert record["curve"][-1]["train_loss"] < record["curve"][0]["train_loss"]
    assert 0 <= record["final"]["test_error"] <= 1


@pytest.mark.parametrize(("size", "per_epoch"), [(8, 2), (20, 1), (1000, 1)])
def test_batches_of_nodes(made_up, size, per_epoch):
    """A model that can be asked for some nodes gets batches of them, each node once an epoch."""
    model = {"name": "gamlp", "options": {"hidden": 16}}
    settings = config("made-up graph", model, epochs=1, batch_size=size)
    built = Session(settings, torch.device("cpu"))
    assert len(built.feed) == per_epoch
    assert built.optimizers[0].batch_size == min(size, 20)
    batches = [built.feed.take() for _ in range(per_epoch)]
    nodes = torch.cat([batch.inputs[2] for batch in batches])
    assert len(nodes.unique()) == len(nodes) == min(size, 20) * per_epoch
    assert nodes.max() < 20
    assert torch.equal(torch.cat([batch.target for batch in batches]), graph().graph.labels[nodes])
    built.step()


def test_hops_are_made_once_for_training_and_tests(made_up, monkeypatch):
    """Elsewhere than on the CPU `to` gives another tensor each time."""
    stays = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *a, **k: stays(x, *a, **k).clone())
    made = []
    hops = graphs.hop_features
    monkeypatch.setattr(graphs, "hop_features", lambda *a: made.append(a) or hops(*a))
    settings = config("made-up graph", {"name": "gamlp", "options": {"hidden": 16}}, epochs=2)
    built = Session(settings, torch.device("cpu"))
    for _ in range(2):
        built.step()
        built.evaluate()
    assert len(made) == 1


def test_a_whole_graph_is_one_batch_of_a_model_that_needs_it(made_up):
    pytest.importorskip("torch_geometric")
    built = Session(config("made-up graph", "gat", epochs=1), torch.device("cpu"))
    assert (len(built.feed), built.terms) == (1, 20)
    (batch,) = built.test
    assert len(batch.target) == len(batch.select) == 14
    built.step()


def test_regression(tmp_path):
    settings = config("diabetes", "linear", epochs=3, loss="square", batch_size=32)
    record = train(settings, out=tmp_path)
    assert record["final"]["test_error"] is None
    assert record["final"]["test_loss"] < 1.2  # 1 is the constant prediction's


def test_the_test_set_is_measured_whole(tmp_path):
    """Means over examples, although the last batch is a smaller one."""
    settings = config("digits", "logistic", epochs=1, batch_size=100)
    built = Session(settings, torch.device("cpu"))
    dataset = session._dataset(settings.data)
    x = dataset.test.x.permute(0, 3, 1, 2).float() / 255
    shape = (1, -1, 1, 1)
    x = (x - torch.tensor(dataset.mean).view(shape)) / torch.tensor(dataset.std).view(shape)
    with torch.no_grad():
        outputs = built.model.eval()(x)
    loss, error = built.evaluate()
    wanted = torch.nn.functional.cross_entropy(outputs, dataset.test.y)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    wrong = (outputs.argmax(1) != dataset.test.y).float().mean().item()
    assert error == pytest.approx(wrong, abs=1e-6)
    assert built.model.training


def test_a_feed_goes_on_inside_an_epoch(made_up):
    settings = config("made-up text", "gpt_micro", steps=1, context=10)
    straight, resumed = (
        Feed(text(), settings.train, torch.device("cpu"), augment=True) for _ in range(2)
    )
    for _ in range(17):  # into the second epoch
        straight.take()
    resumed.seek(straight.position())
    for _ in range(15):  # into the third
        a, b = straight.take(), resumed.take()
        assert torch.equal(a.inputs[0], b.inputs[0])
        assert torch.equal(a.target, b.target)


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({"block_size": "none"}, {"block_size": None}),
        ({"companion": "none"}, {"companion": "none"}),
        ({"betas": [0.9, [1, "none"]]}, {"betas": (0.9, (1, None))}),
        ({"companion_options": {"a": "none"}}, {"companion_options": {"a": None}}),
    ],
)
def test_options_as_functions_expect_them(given, passed):
    assert plain_options(given) == passed
