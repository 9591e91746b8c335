"""The plans of large models, and what a forecast says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootfree.placement.forecast import Forecast, forecast
from rootfree.placement.owners import SLACK

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"
# layers, width, width of the feed-forward part, of keys and values, vocabulary
MODELS = {
    "1.1B": (22, 2048, 5632, 512, 32000),
    "8B": (32, 4096, 14336, 1024, 128256),
    "70B": (80, 8192, 28672, 1024, 128256),
}


def planned(model: str, ranks: int) -> Forecast:
    """A Llama-like model under FSDP2, embedding and head with a diagonal vocabulary axis."""
    layers, d, f, k, vocabulary = MODELS[model]
    hidden = layers * [(d, d), (k, d), (k, d), (d, d), (f, d), (f, d), (d, f)]
    structures = len(hidden) * ["auto"] + 2 * [("diagonal", "dense")]
    return forecast([*hidden, *2 * [(vocabulary, d)]], world=ranks, structures=structures)


@pytest.mark.parametrize(
    ("model", "ranks", "imbalance"), [("8B", 1024, "1.02"), ("70B", 64, "1.05")]
)
def test_a_vocabulary_does_not_wreck_the_balance(model, ranks, imbalance):
    assert f"{planned(model, ranks).imbalance:.2f}" == imbalance
    said = f"{imbalance} for {model} on {ranks:,} ranks"
    assert said in PAGE.read_text("utf-8").replace("\n", " ")


def test_a_forecast_counts_what_there_is():
    # Blocks of 6 and 5 rows, and FSDP2 cuts rows so too: nothing has to travel.
    found = forecast([(11, 4)], world=2, block_size=8, product_bytes=8, structures=["dense"])
    assert found.owners == [[0, 1]]
    assert found.sent == found.received == [0, 0]
    assert found.factor_bytes == [4 * (36 + 16), 4 * (25 + 16)]
    assert found.momentum_bytes == [4 * 24, 4 * 20]
    assert found.imbalance == 2 * max(found.flops) / sum(found.flops) <= SLACK + 0.2
    # On three ranks, which hold 4, 4 and 3 rows, owners get the rows that they lack.
    found = forecast([(11, 4)], world=3, block_size=8, product_bytes=8, structures=["dense"])
    assert found.owners == [[0, 2]]
    assert sum(found.sent) == sum(found.received) == 2 * 8 * 4 * (2 + 2)
    # Whole parameters: the owner sends what it updates to the two others.
    found = forecast([(11, 4)], world=3, block_size=8, structures=["dense"], sharding="ddp")
    assert sorted(found.sent) == [0, 4 * 20 * 2, 4 * 24 * 2]
    assert sum(found.received) == sum(found.sent)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world": 0}, "world must be a positive integer, got 0"),
        ({"world": 2, "sharding": "tp"}, "sharding must be one of fsdp2, ddp, got 'tp'"),
        ({"world": 2, "structures": []}, "structures must have an entry for each of the 1 shapes"),
    ],
)
def test_a_forecast_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        forecast([(4, 4)], **given)
