"""`rootfree train` on several ranks: one record, that of one process; resumed on fewer of them."""

from __future__ import annotations

import pytest

from distributed.laboratory import OPTIMIZERS, STEPS, config
from distributed.program import FIRST, SECOND, ranks  # noqa: F401  (a fixture)
from rootfree_lab.config.reading import ConfigError
from rootfree_lab.training.run import train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_interrupted_on_four_ranks_and_resumed_on_two(ranks, tmp_path, name):  # noqa: F811
    expected = train(config(name, "none"), out=tmp_path)
    for rank in ranks[FIRST]:
        assert rank["laboratory"][name] == (128 + 15, [])
    for rank in ranks[SECOND]:
        (record,) = rank["laboratory"][name]
        assert record["completed"]
        assert record["steps"] == STEPS
        assert record["identity"] == expected["identity"]
        assert record["parallel"][1] == 2
        for mine, theirs in zip(record["curve"], expected["curve"], strict=True):
            for key in ("train_loss", "test_loss", "test_error"):
                assert mine[key] == pytest.approx(theirs[key], rel=1e-5)


def test_what_ranks_cannot_divide_is_refused(ranks, tmp_path, monkeypatch):  # noqa: F811
    assert "multiple of the number of ranks, 4, got 33" in ranks[FIRST][0]["laboratory"]["uneven"]
    with pytest.raises(ConfigError, match=r"train.parallel = 'ddp' needs torchrun"):
        train(config("AdamW", "ddp"), out=tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="parallel must be ddp, fsdp2 or hsdp under torchrun"):
        train(config("AdamW", "none"), out=tmp_path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"graphs goes with train\.parallel = 'none', got 'ddp'"):
        config("AdamW", "ddp", graphs=True)
