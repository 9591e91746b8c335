"""The conformance tests on an optimizer with groups of both kinds.

Tests that are imported here run with this module's `row`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import rootfree
from conformance.problems import batches, identical, loss_of, network, snapshot, train
from conformance.rows import LOOSE, Row
from conformance.test_checkpoint import (  # noqa: F401
    test_deepcopy_and_pickle,
    test_load_hooks_run,
    test_resume_is_bit_identical,
)
from conformance.test_compiled_and_asynchronous import test_compiled_step_equals_eager  # noqa: F401
from conformance.test_convergence import test_learns_a_small_network  # noqa: F401
from conformance.test_errors import (  # noqa: F401
    test_complex_gradients_are_refused_and_change_nothing,
    test_sparse_gradients_are_refused_and_change_nothing,
)
from conformance.test_parameters import (  # noqa: F401
    test_channels_last_equals_contiguous,
    test_frozen_parameters,
    test_named_parameters,
    test_no_gradients_at_all_changes_nothing,
    test_parameters_without_gradient_are_left_alone,
    test_scalar_empty_and_singleton_parameters,
    test_state_is_plain_and_eager,
    test_summary_lists_every_parameter_and_its_bytes,
    test_the_others_do_not_notice_a_missing_gradient,
    test_zero_gradients_keep_everything_finite,
)
from conformance.test_training_loop import (  # noqa: F401
    test_accumulated_gradients_equal_one_large_batch,
    test_closure_returns_the_loss_and_equals_the_plain_loop,
    test_gradient_scaler,
    test_gradients_are_never_modified,
    test_profiler_names,
    test_step_hooks,
    test_tensor_lr_equals_number,
    test_zero_grad,
)


def tensor(entry: Any) -> torch.Tensor:
    return entry[1] if isinstance(entry, tuple) else entry


class WithCompanion(rootfree.IFShampoo):
    """Splits the group that it is given: matrices for itself, the others for AdamW."""

    def __init__(self, params: Any, **options: Any) -> None:
        entries = list(params)
        if not isinstance(entries[0], dict):
            matrices = [each for each in entries if tensor(each).dim() > 1]
            rest = [each for each in entries if tensor(each).dim() <= 1]
            left = {"params": rest, "companion": "adamw", "lr": options["lr"]}
            entries = [{"params": matrices}, left]
            entries = [group for group in entries if group["params"]]
        super().__init__(entries, **options)


@pytest.fixture
def row() -> Row:
    settings = {"lr": 0.006, "block_size": 24, "weight_decay": 1e-4, **LOOSE}
    return Row("IFShampoo-companion", WithCompanion, settings)


def test_schedulers_and_scalers_serve_both_kinds(row):
    """As if every group had an optimizer, a schedule of its own, and no scaler."""
    model, other = network(), network()
    optimizer = row.make(model.parameters())
    matrices = [p for p in other.parameters() if p.dim() > 1]
    vectors = [p for p in other.parameters() if p.dim() <= 1]
    optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["initial_lr"] = 0.05
    apart = [
        rootfree.IFShampoo(matrices, batch_size=32, **row.settings),
        torch.optim.AdamW(vectors, lr=0.05, weight_decay=1e-4, foreach=True),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    schedules = [lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)) for o in (optimizer, *apart)]
    for x, y in batches(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        other.zero_grad()
        loss_of(other, x, y).backward()
        for each in apart:
            each.step()
        for schedule in schedules:
            schedule.step()
    assert identical([*model.parameters()], [*other.parameters()])
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.05 / 6]


def test_one_cycle(row):
    """A scheduler that also moves momentum, which AdamW's groups have not."""
    model = network()
    optimizer = row.make(model.parameters())
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.1], total_steps=8)
    for data in batches(6):
        train(model, optimizer, [data])
        schedule.step()
    assert all(torch.isfinite(t).all() for t in snapshot(optimizer))
