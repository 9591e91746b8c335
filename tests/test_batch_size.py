"""`track_batch_size`: what is counted, when, and what is left behind."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rootfree
from rootfree import track_batch_size


class Flexible(nn.Module):
    """Takes tensors however they are wrapped, and gives them back however `wrap` says."""

    def __init__(self, find=lambda args, kwargs: args[0], wrap=lambda y: y) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.find, self.wrap = find, wrap

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrap(self.linear(self.find(args, kwargs)))


@dataclass
class Batch:
    """Inputs as some libraries pass them."""

    name: str
    x: Tensor


@dataclass
class Output:
    """Outputs as some libraries return them."""

    logits: Tensor
    loss: Tensor | None = None


def tracked(model: nn.Module | None = None, **options: Any) -> Any:
    model = nn.Linear(3, 1) if model is None else model
    optimizer = rootfree.RFRMSprop(model.parameters(), lr=0.01)
    return model, optimizer, track_batch_size(model, optimizer, **options)


def backward(model: nn.Module, length: int = 8) -> None:
    model(torch.randn(length, 3)).square().mean().backward()


# --- what is counted ----------------------------------------------------------------------------

WAYS_IN = {
    "positional": (lambda x: ((x,), {}), lambda a, k: a[0]),
    "second positional": (lambda x: (("name", x), {}), lambda a, k: a[1]),
    "keyword": (lambda x: ((), {"x": x}), lambda a, k: k["x"]),
    "keyword among others": (lambda x: ((), {"flag": True, "x": x}), lambda a, k: k["x"]),
    "dict": (lambda x: (({"x": x},), {}), lambda a, k: a[0]["x"]),
    "list in a dict": (lambda x: (({"x": [x]},), {}), lambda a, k: a[0]["x"][0]),
    "tuple in a keyword": (lambda x: ((), {"batch": ("id", x)}), lambda a, k: k["batch"][1]),
    "dataclass": (lambda x: ((Batch("train", x),), {}), lambda a, k: a[0].x),
    "after a scalar": (lambda x: ((torch.tensor(0.5), x), {}), lambda a, k: a[1]),
}


@pytest.mark.parametrize("way", WAYS_IN)
def test_inputs_however_they_are_passed(way):
    pack, find = WAYS_IN[way]
    model, optimizer, _ = tracked(Flexible(find))
    for length in (8, 5):  # nothing is remembered from the step before
        optimizer.zero_grad()
        args, kwargs = pack(torch.randn(length, 3))
        model(*args, **kwargs).mean().backward()
        optimizer.step()
        assert optimizer.batch_size == length


WAYS_OUT = {
    "tuple": (lambda y: (y, y + 1), lambda out: out[0] + out[1]),
    "dict": (lambda y: {"a": y, "b": 2 * y}, lambda out: out["a"] * out["b"]),
    "dataclass": (lambda y: Output(y, y.mean()), lambda out: out.loss),
    "only the second is used": (lambda y: [y, 3 * y], lambda out: out[1]),
}


@pytest.mark.parametrize("way", WAYS_OUT)
def test_outputs_however_they_are_returned_are_one_batch(way):
    wrap, use = WAYS_OUT[way]
    model, optimizer, _ = tracked(Flexible(wrap=wrap))
    use(model(torch.randn(8, 3))).mean().backward()
    optimizer.step()
    assert optimizer.batch_size == 8


def test_two_backward_passes_through_one_forward_are_one_batch():
    model, optimizer, _ = tracked()
    y = model(torch.randn(8, 3))
    y.mean().backward(retain_graph=True)
    y.square().mean().backward()
    optimizer.step()
    assert optimizer.batch_size == 8


def test_evaluation_is_not_counted():
    model, optimizer, _ = tracked()
    with torch.no_grad():
        model(torch.randn(100, 3))
    with torch.inference_mode():
        model(torch.randn(100, 3))
    model.eval()
    model(torch.randn(100, 3))
    model.train()
    model(torch.randn(100, 3))  # never differentiated
    backward(model, 8)
    optimizer.step()
    assert optimizer.batch_size == 8


def test_evaluation_with_gradients_in_eval_mode_is_not_counted():
    model, optimizer, _ = tracked()
    model.eval()
    backward(model, 100)
    model.train()
    backward(model, 8)
    optimizer.step()
    assert optimizer.batch_size == 8


def test_micro_batches_add_up_until_the_step():
    model, optimizer, _ = tracked()
    for micro_batches in ((4, 4, 3), (2,), (5, 1)):
        optimizer.zero_grad()
        for length in micro_batches:
            backward(model, length)
        optimizer.step()
        assert optimizer.batch_size == sum(micro_batches)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_forward_and_backward(set_to_none):
    model, optimizer, _ = tracked()
    backward(model, 100)
    loss = model(torch.randn(8, 3)).mean()
    optimizer.zero_grad(set_to_none)
    loss.backward()
    optimizer.step()
    assert optimizer.batch_size == 8


def test_a_step_that_the_gradient_scaler_skipped_is_not_counted_into_the_next():
    model, optimizer, _ = tracked()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.weight.detach().clone()
    for length, factor in ((100, float("inf")), (8, 1.0)):
        optimizer.zero_grad()
        scaler.scale(factor * model(torch.randn(length, 3)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before) == (length == 100)
    assert optimizer.batch_size == 8


def test_closure():
    model, optimizer, _ = tracked()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 3)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        assert optimizer.batch_size == 8


def test_count_function_sees_positional_and_keyword_arguments():
    """Tokens of a language model: everything but the padding."""

    def tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        assert len(args) == 1
        return int(kwargs["mask"].sum())

    model = Flexible(lambda args, kwargs: args[0] * kwargs["mask"][..., None])
    model, optimizer, _ = tracked(model, count=tokens)
    mask = torch.ones(4, 6)
    mask[0, 3:] = 0
    for _ in range(2):
        model(torch.randn(4, 6, 3), mask=mask).mean().backward()
    optimizer.step()
    assert optimizer.batch_size == 2 * 21


def test_the_first_step_uses_what_was_counted():
    """B reaches the update: tracked training equals training with the number given."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    other = copy.deepcopy(model)
    model, optimizer, _ = tracked(model)
    by_hand = rootfree.RFRMSprop(other.parameters(), lr=0.01)
    for length in (4, 16, 7):
        x = torch.randn(length, 3)
        by_hand.batch_size = length
        for m, o in ((model, optimizer), (other, by_hand)):
            o.zero_grad()
            m(x).square().mean().backward()
            o.step()
    assert torch.equal(model.weight, other.weight)
    assert optimizer.batch_size == 7


# --- around the model ---------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_model(when):
    torch._dynamo.reset()
    model = nn.Linear(3, 1)
    compiled = torch.compile(model, backend="eager") if when == "after" else model
    compiled, optimizer, _ = tracked(compiled)
    if when == "before":
        compiled = torch.compile(model, backend="eager")
    for micro_batches in ((8,), (8,), (5, 2)):
        optimizer.zero_grad()
        for length in micro_batches:
            backward(compiled, length)
        with torch.no_grad():
            compiled(torch.randn(100, 3))
        optimizer.step()
        assert optimizer.batch_size == sum(micro_batches)
    compiled.eval()
    compiled(torch.randn(100, 3)).mean().backward()
    compiled.train()
    optimizer.zero_grad()
    backward(compiled, 4)
    optimizer.step()
    assert optimizer.batch_size == 4


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_recomputes_but_counts_once(use_reentrant):
    model, optimizer, _ = tracked(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)))
    x = torch.randn(8, 3, requires_grad=True)
    for micro_batches in (1, 2):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            y = checkpoint(model, x, use_reentrant=use_reentrant)
            y.square().mean().backward()
        optimizer.step()
        assert optimizer.batch_size == 8 * micro_batches


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_inside_the_model(use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.inner, x, use_reentrant=use_reentrant))

    model, optimizer, _ = tracked(Checkpointed())
    model(torch.randn(8, 3, requires_grad=True)).square().mean().backward()
    optimizer.step()
    assert optimizer.batch_size == 8


@pytest.mark.slow
def test_two_data_parallel_ranks(tmp_path):
    """With DDP, either the wrapper or the module inside is tracked; the ranks' batches add up."""
    script = str(Path(__file__).with_name("two_ranks.py"))
    address = (tmp_path / "rendezvous").as_uri()
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        try:
            out, err = rank.communicate(timeout=120)
        finally:
            rank.kill()
        assert rank.returncode == 0, err
        assert json.loads(out) == {
            "wrapper": [16, 14],
            "inner": [16, 14],
            "data_parallel_size=1": [8, 7],
        }


def test_data_parallel_size_multiplies():
    model, optimizer, _ = tracked(data_parallel_size=4)
    backward(model, 8)
    optimizer.step()
    assert optimizer.batch_size == 32


# --- what is left behind ------------------------------------------------------------------------


def hooks(model: nn.Module) -> list[Any]:
    names = [name for name in vars(model) if name.endswith(("_hooks", "_hooks_with_kwargs"))]
    assert "_forward_hooks" in names
    return [entry for name in names for entry in (getattr(model, name) or {})]


def test_remove_leaves_no_hook_and_keeps_the_last_batch_size():
    model, optimizer, handle = tracked()
    assert hooks(model)
    backward(model, 8)
    optimizer.step()
    handle.remove()
    assert hooks(model) == []
    backward(model, 4)
    optimizer.step()
    assert optimizer.batch_size == 8
    handle.remove()  # once more does no harm


def test_context_leaves_no_hook_even_after_an_error():
    model, optimizer, handle = tracked(count=lambda args, kwargs: 1 // 0)
    with pytest.raises(ZeroDivisionError), handle as entered:
        model(torch.randn(8, 3))
    assert entered is handle
    assert hooks(model) == []
    with track_batch_size(model, optimizer):  # and may be tracked again
        backward(model, 4)
        optimizer.step()
    assert optimizer.batch_size == 4


def test_an_old_handle_does_not_stop_a_new_one():
    model, optimizer, old = tracked()
    old.remove()
    new = track_batch_size(model, optimizer)
    old.remove()
    backward(model, 4)
    optimizer.step()
    assert optimizer.batch_size == 4
    new.remove()


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))],
    ids=["deepcopy", "pickle"],
)
def test_a_tracked_optimizer_can_be_copied(duplicate):
    """The copy is not tracked: it belongs to other parameters; it keeps the last batch size."""
    model, optimizer, _ = tracked()
    backward(model, 8)
    optimizer.step()
    twin = duplicate(optimizer)
    assert twin.batch_size == 8
    assert twin._batch_counter is None
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    twin.step()
    assert twin.batch_size == 8
    optimizer.zero_grad()
    backward(model, 4)
    optimizer.step()
    assert optimizer.batch_size == 4


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_a_copy_of_a_tracked_model_is_not_tracked(duplicate):
    """Averaged copies (EMA) and saved models must not drag the optimizer and its state along."""
    calls = []

    def count(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:  # local: cannot be pickled
        calls.append(len(args[0]))
        return len(args[0])

    model, optimizer, _ = tracked(count=count)
    twin = duplicate(model)
    backward(twin, 4)
    assert calls == []
    backward(model, 8)
    optimizer.step()
    assert optimizer.batch_size == 8


def test_checkpoints_do_not_hold_the_tracker():
    model, optimizer, handle = tracked()
    backward(model, 8)
    optimizer.step()
    state_dict = optimizer.state_dict()
    handle.remove()
    other = rootfree.RFRMSprop(nn.Linear(3, 1).parameters())
    other.load_state_dict(state_dict)
    assert other.batch_size == 8


# --- errors -------------------------------------------------------------------------------------


def test_wrong_types():
    model = nn.Linear(3, 1)
    optimizer = rootfree.RFRMSprop(model.parameters())
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got function"):
        track_batch_size(lambda x: x, optimizer)
    with pytest.raises(TypeError, match="one of rootfree's optimizers, got SGD"):
        track_batch_size(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for wrong in (0, -1, 2.0, "2", True):
        with pytest.raises((TypeError, ValueError), match="data_parallel_size must be a positive"):
            track_batch_size(model, optimizer, data_parallel_size=wrong)
    assert hooks(model) == []
    backward(model)
    with pytest.raises(RuntimeError, match="batch_size is not set"):
        optimizer.step()  # none of the failed calls left a tracker


def test_tracked_twice():
    model, optimizer, _ = tracked()
    before = len(hooks(model))
    with pytest.raises(ValueError, match="tracked already"):
        track_batch_size(model, optimizer)
    assert len(hooks(model)) == before


def test_a_step_without_a_counted_backward_pass_says_so_and_changes_nothing():
    model, optimizer, _ = tracked()
    model.eval()
    backward(model)
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"saw no backward pass.*model.train\(\)"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_an_output_that_cannot_be_followed_is_named():
    model = Flexible(wrap=lambda y: SimpleNamespace(logits=y))
    optimizer = rootfree.RFRMSprop(model.parameters())
    track_batch_size(model, optimizer)
    model(torch.randn(4, 3)).logits.mean().backward()
    with pytest.raises(RuntimeError, match="output of Flexible, of type SimpleNamespace"):
        optimizer.step()


def test_a_step_without_gradients_needs_no_count():
    _, optimizer, _ = tracked()
    optimizer.step()
    assert optimizer.batch_size is None


@pytest.mark.parametrize("value", [-3, 2.0, "8", None, True])
def test_a_bad_count_is_refused_in_the_forward_pass(value):
    model, _, _ = tracked(count=lambda args, kwargs: value)
    with pytest.raises(
        (TypeError, ValueError), match="count of loss terms must be an integer of at least 0, got"
    ):
        model(torch.randn(8, 3))


def test_inputs_without_a_tensor_ask_for_a_count():
    model, _, _ = tracked(Flexible(lambda args, kwargs: torch.randn(8, 3)))
    with pytest.raises(ValueError, match="give track_batch_size a count"):
        model("a string", torch.tensor(1.0), key=[1, 2])


def test_a_step_refused_for_its_gradient_leaves_the_count_and_the_batch_size():
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = rootfree.RFRMSprop(embedding.parameters(), batch_size=2)
    with rootfree.track_batch_size(embedding, optimizer, "examples"):
        embedding(torch.tensor([1, 2, 3])).sum().backward()
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
        assert optimizer.batch_size == 2
        embedding.weight.grad = embedding.weight.grad.to_dense()
        optimizer.step()
        assert optimizer.batch_size == 3
