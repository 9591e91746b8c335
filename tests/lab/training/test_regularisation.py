"""Label smoothing, clipping and erasing reach the run."""

from __future__ import annotations

import pytest
import torch

from rootfree_lab.config.files import config_from
from rootfree_lab.training.losses import cross_entropy
from rootfree_lab.training.session import Session


def session(*, data=None, **train) -> Session:
    tables = {
        "data": {"name": "digits", "limit": 64, **(data or {})},
        "model": {"name": "small_cnn"},
        "optimizer": {"name": "SGD", "lr": 1.0},
        "train": {"steps": 1, "batch_size": 64, "device": "cpu", **train},
    }
    return Session(config_from(tables), torch.device("cpu"))


def test_a_smoothed_run_is_tested_without_smoothing():
    smooth, plain = session(label_smoothing=0.3), session()
    assert smooth.evaluate() == plain.evaluate()
    (batch,) = smooth.test
    expected = cross_entropy(smooth.model(*batch.inputs), batch.target).item()
    assert smooth.evaluate()[0] == pytest.approx(expected, rel=1e-5)
    smooth.step()
    plain.step()
    assert (
        smooth.running.mean_loss() != plain.running.mean_loss()
    )  # the same batch, the same parameters


def test_clipping_bounds_the_norm_of_all_gradients_together():
    def moved(**train):
        run = session(**train)
        before = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
        run.step()
        after = torch.nn.utils.parameters_to_vector(run.model.parameters()).detach()
        return after - before  # SGD with lr 1: minus the gradient

    free = moved()
    clipped = moved(clip_norm=0.5 * free.norm().item())
    assert clipped.norm().item() == pytest.approx(0.5 * free.norm().item(), rel=1e-3)
    torch.testing.assert_close(clipped, 0.5 * free, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(moved(clip_norm=2 * free.norm().item()), free)


def test_erasing_and_resized_crops_reach_the_batches():
    plain = session().feed.take().inputs[0]
    augmented = {"augment": True, "crop": "resized", "erase": 1.0}
    changed = session(data=augmented).feed.take().inputs[0]
    assert changed.shape == plain.shape
    # A pixel of a digit has one of 17 values; noise is never one of them.
    levels = plain.unique()
    assert not torch.isin(changed, levels).all()
    tested = [batch.inputs[0] for batch in session(data=augmented).test]
    assert torch.isin(torch.cat(tested), levels).all()
