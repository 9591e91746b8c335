"""Lightning: the callback, tracking in a module, clipping, bf16, resuming."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import rootfree
from integrations.needs import needs

pytestmark = [
    pytest.mark.slow,
    needs("lightning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EXAMPLES, BATCH = 22, 4  # six batches, the last of two


@pytest.fixture(scope="module")
def L():
    import logging

    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return lightning


def make_module(L, method=rootfree.RFRMSprop, *, calls_itself=True, tracks=None):
    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
            self.batch_sizes: list[int] = []
            self.skipped: set[int] = set()

        def forward(self, x):
            return self.network(x)

        def training_step(self, batch, index):
            if index in self.skipped:
                return None
            x, y = batch
            outputs = self(x) if calls_itself else self.network(x)
            return nn.functional.cross_entropy(outputs, y)

        def configure_optimizers(self):
            optimizer = method(rootfree.parameter_groups(self, companion=None), lr=1e-2)
            if tracks is not None:
                rootfree.track_batch_size(tracks(self), optimizer)
            if "batch_size" in optimizer.options:
                optimizer.register_step_post_hook(
                    lambda o, *_: self.batch_sizes.append(o.batch_size)
                )
            return optimizer

    return Module()


def loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, 4, generator=generator)
    data = torch.utils.data.TensorDataset(x, (3 * x[:, 0].sigmoid()).long())
    return torch.utils.data.DataLoader(data, batch_size=BATCH)


def fit(L, module, folder, *, callbacks=(), path=None, **options):
    quiet = ("logger", "enable_progress_bar", "enable_model_summary")
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **dict.fromkeys(quiet, False)}
    options = {**defaults, "enable_checkpointing": False, **options}
    trainer = L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **options)
    trainer.fit(module, loader(), ckpt_path=path)
    return module


@pytest.fixture
def counting():
    from rootfree.integrations.lightning import BatchSizeCallback

    return BatchSizeCallback


@pytest.mark.parametrize("calls_itself", [True, False])
def test_the_callback_adds_up_what_is_accumulated(L, counting, calls_itself, tmp_path):
    """Six batches in steps of four: the second step has two, whose losses are divided by four."""
    module = make_module(L, calls_itself=calls_itself)
    fit(L, module, tmp_path, callbacks=[counting()], accumulate_grad_batches=4)
    assert module.batch_sizes == [4 * BATCH, 4 * (BATCH + 2) // 2]


def test_a_step_on_micro_batches_is_that_on_the_whole(L, counting, tmp_path):
    """The parameters after an epoch of two steps are those of a loop by hand."""
    found = fit(
        L,
        make_module(L, rootfree.IFShampoo),
        tmp_path,
        callbacks=[counting()],
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
        limit_train_batches=3,
        max_epochs=2,
    )
    model = make_module(L).network
    x = torch.cat([x for x, _ in [*loader()][:3]])
    y = torch.cat([y for _, y in [*loader()][:3]])
    groups = rootfree.parameter_groups(model, companion=None)
    optimizer = rootfree.IFShampoo(groups, lr=1e-2, batch_size=3 * BATCH)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for a, b in zip(found.network.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_batch_without_a_loss_is_not_counted(L, counting, tmp_path):
    module = make_module(L)
    module.skipped = {1}
    fit(L, module, tmp_path, callbacks=[counting()], accumulate_grad_batches=2)
    # (4, -) and (4, 4) and (4, 2); losses are divided by two, however many there are
    assert module.batch_sizes == [8, 8, 6]


@pytest.mark.parametrize(
    ("tracks", "calls_itself"),
    [(lambda self: self, True), (lambda self: self.network, False)],
    ids=["itself", "its network"],
)
def test_tracking_in_the_module(L, tracks, calls_itself, tmp_path):
    """Without the callback; the wrapper that `self.optimizers()` gives is looked through, too."""
    module = make_module(L, calls_itself=calls_itself, tracks=tracks)
    fit(L, module, tmp_path, accumulate_grad_batches=3)
    assert module.batch_sizes == [3 * BATCH, 2 * BATCH + 2]
    wrapped = module.optimizers()
    assert wrapped is not wrapped.optimizer
    with pytest.raises(ValueError, match="tracked already"):
        rootfree.track_batch_size(module, wrapped)


def test_tracking_by_the_wrapper(L, tmp_path):
    """As in a hook of the module, which sees the wrapper alone."""
    module = make_module(L)
    module.on_fit_start = lambda: rootfree.track_batch_size(module, module.optimizers())
    fit(L, module, tmp_path)
    assert module.batch_sizes == [BATCH] * 5 + [2]


def test_a_module_that_is_not_called_says_what_to_do(L, counting, tmp_path):
    module = make_module(L, calls_itself=False, tracks=lambda self: self)
    with pytest.raises(RuntimeError, match=r"through Module .* the network that it\s+calls"):
        fit(L, module, tmp_path)
    module = make_module(L, tracks=lambda self: self)
    with pytest.raises(RuntimeError, match="track_batch_size counts for this optimizer already"):
        fit(L, module, tmp_path, callbacks=[counting()])
    module = make_module(L)
    module.automatic_optimization = False
    with pytest.raises(RuntimeError, match="counts for automatic optimization"):
        fit(L, module, tmp_path, callbacks=[counting()])


def test_whitening_needs_no_count(L, counting, tmp_path):
    module = fit(L, make_module(L, rootfree.IFWhitening), tmp_path, callbacks=[counting()])
    assert module.batch_sizes == []


def test_batches_of_tokens_are_doubted(counting):
    """A function counts them; without one, what looks like tokens is no batch of examples."""
    callback = counting()
    callback._tracked, (callback._count, callback._guesses) = object(), counter_of_examples()
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.int64)}
    with pytest.warns(UserWarning, match=r"counts 2 loss terms.*count='tokens'"):
        callback.on_train_batch_start(None, None, batch, 0)
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        callback.on_train_batch_start(None, None, batch, 1)


def counter_of_examples():
    from rootfree.shell.loss_terms import counter_of

    return counter_of(None, nn.Identity())


def test_bf16_and_resuming_bit_for_bit(L, counting, tmp_path):
    def run(**more):
        module = make_module(L, rootfree.IFShampoo)
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, **more}
        return fit(L, module, tmp_path, callbacks=[counting()], precision="bf16-mixed", **options)

    through, half = run(max_epochs=2), run(max_epochs=1)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = run(max_epochs=2, path=tmp_path / "half.ckpt")
    assert all(map(torch.equal, through.parameters(), resumed.parameters()))
    assert not any(map(torch.equal, half.parameters(), resumed.parameters()))


def test_there_is_a_strategy_that_keeps_matrices(L):
    """As docs/troubleshooting.md says; FSDPStrategy is FSDP1, which is refused."""
    assert issubclass(L.pytorch.strategies.ModelParallelStrategy, L.pytorch.strategies.Strategy)
