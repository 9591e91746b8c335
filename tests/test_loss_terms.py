"""Counting B: tokens, warnings where a count can be wrong, wrappers, and hooks that go."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss, log_softmax, mse_loss, nll_loss

import rootfree
from conformance.problems import nothing_waits

VOCABULARY = 11


class Language(nn.Module):
    """Logits of the next token, and the loss if there are labels, as Hugging Face has them."""

    shifted = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None):
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return logits
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        return OrderedDict(loss=loss, logits=logits)


class TinyForCausalLM(Language):
    shifted = True


class OwnName(TinyForCausalLM):
    """A user's subclass."""


class Wrapped(nn.Module):
    """Like DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def optimizer_of(model: nn.Module) -> rootfree.RFRMSprop:
    return rootfree.RFRMSprop(model.parameters())


def counted(model: nn.Module, forward, **options) -> int:
    """B of one step; any warning is an error."""
    optimizer = optimizer_of(model)
    with rootfree.track_batch_size(model, optimizer, **options), warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(model).backward()
        optimizer.step()
    return optimizer.batch_size


# -- tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "B"),
    [
        (TinyForCausalLM, 16 * 31),
        (OwnName, 16 * 31),
        (lambda: Wrapped(TinyForCausalLM()), 16 * 31),
        (Language, 16 * 32),
    ],
    ids=["shifted", "subclass", "wrapped", "not shifted"],
)
def test_labels_are_counted_as_the_model_uses_them(make, B):
    ids = torch.randint(VOCABULARY, (16, 32))
    found = counted(make(), lambda m: m(input_ids=ids, labels=ids)["loss"], count="tokens")
    assert found == B


@pytest.mark.parametrize("make", [Language, TinyForCausalLM])
def test_labels_that_are_left_out_are_not_counted(make):
    """The gradient of the mean over all is that of the sum over those that count, divided by B."""
    ids = torch.randint(VOCABULARY, (3, 5))
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[1, 0] = -100
    model = make()
    B = counted(copy.deepcopy(model), lambda m: m(ids, labels=labels)["loss"], count="tokens")
    wrapped = Wrapped(copy.deepcopy(model))  # and with labels that are not called by name
    assert counted(wrapped, lambda m: m(ids, labels)["loss"], count="tokens") == B
    model(ids, labels=labels)["loss"].backward()
    mean = model.head.bias.grad.clone()
    model.zero_grad()
    logits = model(ids)
    if make.shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    torch.testing.assert_close(model.head.bias.grad, B * mean)


def test_without_labels_the_ids_are_counted():
    ids = torch.randint(VOCABULARY, (4, 6))

    def loss(model):
        return cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    assert counted(Language(), loss, count="tokens") == 24


class Transposed(Language):
    """Classes on the second axis, as cross entropy takes them."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids).transpose(1, 2)


class Flat(Language):
    """Several outputs; the loss takes one of them."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(input_ids), super().forward(input_ids).flatten(0, 1)


OUTSIDE = {
    "last axis": (Language, lambda y, labels: cross_entropy(y.flatten(0, 1), labels.flatten())),
    "second axis": (Transposed, cross_entropy),
    "flat": (Flat, lambda y, labels: cross_entropy(y[1], labels.flatten())),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_a_loss_outside_of_the_model_tells_by_its_gradient_what_it_leaves_out(case):
    """Labels of -100 have a gradient of zeros; all of zeros, as in the last pass, tells nothing."""
    make, loss = OUTSIDE[case]
    model = make()
    optimizer = optimizer_of(model)
    rootfree.track_batch_size(model, optimizer, "tokens")
    for left_out, factor, B in [((0, 2), 1, 12), ((1, 5), 1, 15), ((0, 2), 1, 12), ((0, 2), 0, 15)]:
        ids = torch.randint(VOCABULARY, (3, 5))
        labels = ids.clone()
        labels[left_out[0], left_out[1] :] = -100
        optimizer.zero_grad()
        (factor * loss(model(ids), labels)).backward()
        optimizer.step()
        assert optimizer.batch_size == B


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_count_waits_for_the_backward_pass_alone():
    """Neither does the backward pass wait, nor the count for what was queued after it."""
    model = Language().to("cuda")
    optimizer = rootfree.IFShampoo(model.parameters())
    tracker = rootfree.track_batch_size(model, optimizer, "tokens")
    for left_out, B in [(2, 12), (4, 14), (1, 11)]:
        ids = torch.randint(VOCABULARY, (3, 5), device="cuda")
        labels = ids.clone()
        labels[0, left_out:] = -100
        for stepping in (False, True):
            loss = cross_entropy(model(ids).flatten(0, 1), labels.flatten())
            with nothing_waits():
                loss.backward()
            if stepping:
                optimizer.step()
                assert optimizer.batch_size == B
                continue
            torch.cuda._sleep(2_000_000_000)  # about a second
            later = torch.cuda.Event()
            later.record()
            assert tracker.take() == B
            assert not later.query(), "the count waited for what came after the backward pass"


def test_positions_of_several_backward_passes_are_put_together():
    """A loss in pieces: the last token has no next one; the third is in two pieces."""
    ids = torch.randint(VOCABULARY, (3, 5))
    model = Language()
    optimizer = optimizer_of(model)
    rootfree.track_batch_size(model, optimizer, "tokens")
    logits = model(ids)
    for piece in (slice(0, 3), slice(2, 4)):
        logits[:, piece].logsumexp(-1).mean().backward(retain_graph=True)
    optimizer.step()
    assert optimizer.batch_size == 12


def test_an_output_without_places_for_the_tokens_is_told():
    class Classifier(Language):
        def forward(self, input_ids: Tensor) -> Tensor:
            return super().forward(input_ids).mean(1)

    ids = torch.randint(VOCABULARY, (3, 5))
    with pytest.raises(UserWarning, match=r"15 tokens of shape \(3, 5\), but.*shape \(3, 11\)"):
        counted(Classifier(), lambda m: m(ids).logsumexp(1).mean(), count="tokens")


def test_tokens_need_integers():
    model = nn.Linear(3, 1)
    optimizer = optimizer_of(model)
    rootfree.track_batch_size(model, optimizer, "tokens")
    with pytest.raises(ValueError, match="no labels and no tensor of token numbers"):
        model(torch.randn(2, 3))


@pytest.mark.parametrize("count", ["token", 3, ("tokens",)])
def test_other_counts_are_refused(count):
    model = nn.Linear(3, 1)
    optimizer = optimizer_of(model)
    with pytest.raises(ValueError, match="count must be None, 'examples', 'tokens' or a function"):
        rootfree.track_batch_size(model, optimizer, count)
    assert optimizer._batch_counter is None
    assert not model._forward_hooks


# -- warnings --------------------------------------------------------------------------------

x = torch.randn(32, 3)
LOSSES = {
    "mse over outputs": (4, lambda y: mse_loss(y, torch.zeros_like(y)), 128),
    "l1 over outputs": (4, lambda y: l1_loss(y, torch.ones_like(y)), 128),
    "mse over one output": (1, lambda y: mse_loss(y, torch.zeros_like(y)), None),
    "cross entropy": (4, lambda y: cross_entropy(y, torch.arange(32) % 4), None),
    "its log": (4, lambda y: nll_loss(log_softmax(y, 1), torch.arange(32) % 4), None),
}


class Reshaped(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(3, torch.Size(shape).numel()), shape

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).view(len(x), *self.shape)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_over_more_than_the_first_axis_is_told(loss, dtype):
    outputs, function, terms = LOSSES[loss]
    model = nn.Linear(3, outputs).to(dtype)
    if terms is None:
        assert counted(model, lambda m: function(m(x.to(dtype)))) == 32
        return
    with pytest.raises(UserWarning, match=rf"counts 32 loss terms.*mean over {terms} numbers"):
        counted(model, lambda m: function(m(x.to(dtype))))
    # Who knows better says so.
    assert counted(model, lambda m: function(m(x.to(dtype))), count="examples") == 32


def test_cross_entropy_over_positions_is_told():
    y = torch.arange(160).view(32, 5) % 4
    with pytest.raises(UserWarning, match="mean over 160 numbers, not over 32"):
        counted(Reshaped(4, 5), lambda m: cross_entropy(m(x), y))


class Two(nn.Module):
    """Hidden numbers beside the predictions, after a first input that has no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, scale: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.inside(scale * x)
        return hidden, self.head(hidden)


def test_of_several_outputs_the_one_that_has_the_loss_is_looked_at():
    one, y = torch.ones(()), torch.arange(32) % 4
    with pytest.raises(UserWarning, match=r"shape \(32, 4\).*mean over 128 numbers, not over 32"):
        counted(Two(), lambda m: m(one, x)[1].square().mean())
    assert counted(Two(), lambda m: cross_entropy(m(one, x)[1], y)) == 32


def test_an_input_whose_first_axis_is_not_that_of_the_loss_is_told():
    y = torch.arange(32) % 4
    with pytest.raises(UserWarning, match=r"counts 1 loss terms.*mean over 32 numbers"):
        counted(Two(), lambda m: cross_entropy(m(torch.ones(1), x)[1], y))


def test_examples_that_cross_entropy_leaves_out_are_told():
    y = torch.where(torch.arange(32) < 20, 1, -100)
    with pytest.raises(UserWarning, match="mean over 20 numbers, not over 32"):
        counted(nn.Linear(3, 4), lambda m: cross_entropy(m(x), y))


def test_sequences_of_integers_are_told():
    ids = torch.randint(VOCABULARY, (4, 6))
    with pytest.raises(UserWarning, match=r"whole numbers of shape \(4, 6\).*count='tokens'"):
        counted(Language(), lambda m: m(ids).mean())


def test_several_forward_passes_in_one_backward_pass_are_told():
    with pytest.raises(UserWarning, match="counts 64 loss terms, but several forward passes"):
        counted(nn.Linear(3, 1), lambda m: (m(x) * m(-x)).mean())


def test_a_warning_is_given_once():
    model = nn.Linear(3, 4)
    optimizer = optimizer_of(model)
    with rootfree.track_batch_size(model, optimizer), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for factor in (torch.nan, 1.0, 1.0):  # a batch that is left out says nothing
            optimizer.zero_grad()
            (factor * model(x)).square().mean().backward()
            optimizer.step()
    assert len(seen) == 1


# -- wrappers and hooks ----------------------------------------------------------------------


@dataclass
class AcceleratedOptimizer:
    """As Accelerate wraps one."""

    optimizer: torch.optim.Optimizer


def test_wrapped_optimizers_are_looked_through():
    model = nn.Linear(3, 1)
    inner = optimizer_of(model)
    rootfree.track_batch_size(model, AcceleratedOptimizer(AcceleratedOptimizer(inner)))
    model(x).mean().backward()
    inner.step()
    assert inner.batch_size == 32
    with pytest.raises(TypeError, match="got AcceleratedOptimizer"):
        rootfree.track_batch_size(
            model, AcceleratedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        )


def test_an_optimizer_that_goes_takes_its_hook_along():
    model = nn.Linear(3, 1)
    optimizer = optimizer_of(model)
    handle = rootfree.track_batch_size(model, optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None  # neither the model nor the handle keeps it
    model(x).mean().backward()
    del handle
    gc.collect()
    assert not model._forward_hooks


def test_tracking_goes_on_without_the_handle():
    model = nn.Linear(3, 1)
    optimizer = optimizer_of(model)
    rootfree.track_batch_size(model, optimizer)
    gc.collect()
    model(x).mean().backward()
    optimizer.step()
    assert optimizer.batch_size == 32


def test_labels_that_were_shifted_before():
    """Collators without padding give `shift_labels` beside `labels`; the loss takes those."""

    class PackedForCausalLM(Language):
        def forward(self, input_ids: Tensor, labels: Tensor, shift_labels: Tensor):
            logits = self.head(self.embedding(input_ids))
            return cross_entropy(logits.flatten(0, 1), shift_labels.flatten())

    ids = torch.randint(VOCABULARY, (2, 6))
    shifted = ids.roll(-1, 1)
    shifted[:, [2, 5]] = -100  # two sequences in each row

    def forward(model: nn.Module) -> Tensor:
        return model(ids, labels=ids, shift_labels=shifted)

    assert counted(PackedForCausalLM(), forward, count="tokens") == 8
