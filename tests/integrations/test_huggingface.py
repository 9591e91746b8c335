"""The Trainer of transformers: the batch size that its loss means, groups, resuming, LoRA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rootfree
from integrations.language import Classifier, arguments, gpt2, llama, texts, vectors
from integrations.needs import needs

pytestmark = [pytest.mark.slow, needs("transformers", "accelerate")]


@pytest.fixture
def huggingface():
    from rootfree.integrations import huggingface

    return huggingface


class Divisors:
    """What losses were divided by: gradients of the sum of their terms over their own."""

    def __init__(self, model: nn.Module, optimizer, summed) -> None:
        self._inputs: list = []
        self._summed = summed
        self.from_gradients: list[float] = []
        self.batch_sizes: list[int] = []
        model.register_forward_hook(self._keep, with_kwargs=True)
        optimizer.register_step_pre_hook(lambda *_: self._compare(model))
        optimizer.register_step_post_hook(lambda o, *_: self.batch_sizes.append(o.batch_size))

    def _keep(self, module, args, kwargs, output):
        if module.training and torch.is_grad_enabled():
            self._inputs.append(kwargs)

    def _compare(self, model):
        ps, inputs = list(model.parameters()), self._inputs
        with torch.enable_grad():
            model.eval()
            total = sum(self._summed(model, each) for each in inputs)
            model.train()
            G = torch.cat([each.flatten() for each in torch.autograd.grad(total, ps)])
        g = torch.cat([p.grad.flatten() for p in ps])
        self.from_gradients.append(float(G @ g / (g @ g)))
        self._inputs = []


def sum_of_next_tokens(model, inputs):
    logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
    labels = inputs["labels"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def sum_of_classes(model, inputs):
    return nn.functional.cross_entropy(model.layers(inputs["x"]), inputs["labels"], reduction="sum")


def trainer_of(model, data, folder, *, callbacks=(), optimizer=None, **options):
    import transformers

    trainer = transformers.Trainer(
        model,
        arguments(folder, **options),
        train_dataset=data,
        callbacks=list(callbacks),
        optimizers=(optimizer, None),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


@pytest.mark.parametrize(
    ("make", "data", "summed"),
    [
        (gpt2, texts, sum_of_next_tokens),
        (llama, texts, sum_of_next_tokens),
        (Classifier, vectors, sum_of_classes),
    ],
    ids=["gpt2", "llama", "a model that is not told"],
)
def test_the_callback_sets_what_the_loss_is_divided_by(huggingface, make, data, summed, tmp_path):
    model = make()
    optimizer = rootfree.RFRMSprop(model.parameters(), lr=1e-3)
    divisors = Divisors(model, optimizer, summed)
    callbacks = [huggingface.BatchSizeCallback()]
    trainer_of(model, data(), tmp_path, callbacks=callbacks, optimizer=optimizer).train()
    assert len(divisors.batch_sizes) == 4
    assert len({*divisors.batch_sizes}) >= 2  # steps differ, the last of an epoch is short
    assert divisors.from_gradients == pytest.approx(divisors.batch_sizes, rel=1e-3)


def test_labels_that_the_trainer_keeps_to_itself(huggingface, tmp_path):
    """Label smoothing takes them away from the model, which is told their number."""
    model = llama()
    optimizer = rootfree.RFRMSprop(model.parameters(), lr=1e-3)
    found = []
    optimizer.register_step_post_hook(lambda o, *_: found.append(o.batch_size))
    data, callbacks = texts(6), [huggingface.BatchSizeCallback()]
    options = {"label_smoothing_factor": 0.1, "max_steps": 2}
    trainer_of(model, data, tmp_path, callbacks=callbacks, optimizer=optimizer, **options).train()
    assert found == 2 * [sum(int((each["labels"][1:] != -100).sum()) for each in data)]


def test_what_cannot_be_counted_is_refused(huggingface, tmp_path):
    class Unlabelled(Classifier):
        def forward(self, x):
            logits = self.layers(x)
            return {"loss": logits.square().mean(), "logits": logits}

    model = Unlabelled()
    optimizer = rootfree.RFRMSprop(model.parameters())
    data = [{"x": each["x"]} for each in vectors()]
    callback = huggingface.BatchSizeCallback()
    trainer = trainer_of(model, data, tmp_path, callbacks=[callback], optimizer=optimizer)
    with pytest.raises(ValueError, match=r"no labels reach the model.*function as count"):
        trainer.train()
    callback = huggingface.BatchSizeCallback(count=lambda args, kwargs: 3 * len(kwargs["x"]))
    trainer_of(model, data, tmp_path, callbacks=[callback], optimizer=optimizer).train()
    assert optimizer.batch_size == 3 * 4  # the last step of an epoch
    assert optimizer._batch_counter is None  # taken off in the end

    several = SimpleNamespace(n_gpu=2, average_tokens_across_devices=True)
    with pytest.raises(RuntimeError, match=r"between 2 GPUs with nn\.DataParallel.*torchrun"):
        callback.on_train_begin(several, None, None, model=model, optimizer=optimizer)
    sgd = torch.optim.SGD(model.parameters())
    with pytest.raises(TypeError, match="optimizer must be one of rootfree's"):
        callback.on_train_begin(several, None, None, model=model, optimizer=sgd)


def test_whitening_needs_no_count(huggingface, tmp_path):
    model = Classifier()
    optimizer = rootfree.IFWhitening(rootfree.parameter_groups(model))
    callbacks = [huggingface.BatchSizeCallback()]
    trainer_of(model, vectors(), tmp_path, callbacks=callbacks, optimizer=optimizer).train()
    assert optimizer._batch_counter is None


def test_the_groups_that_the_trainer_makes(huggingface, tmp_path):
    """A class in `optimizer_cls_and_kwargs`: with and without weight decay."""
    import transformers

    trainer = transformers.Trainer(
        llama(),
        arguments(tmp_path, weight_decay=0.1, max_steps=2),
        train_dataset=texts(),
        callbacks=[huggingface.BatchSizeCallback()],
        optimizer_cls_and_kwargs=(rootfree.RFAdamW, {"lr": 1e-2}),
    )
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert type(optimizer) is rootfree.RFAdamW
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.batch_size > 1


def adapted(model):
    import peft

    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    "adapt",
    [lambda model: model, pytest.param(adapted, marks=needs("peft"))],
    ids=["whole", "LoRA"],
)
def test_a_run_resumes_bit_for_bit(huggingface, adapt, tmp_path):
    """By `optimizer_cls_and_kwargs`, with clipping, warmup and decay of the step size."""
    import transformers

    def train(resumed: bool):
        model = adapt(llama())
        frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
        kwargs = {"method": rootfree.IFShampoo, "lr": 1e-2, "weight_decay": 0.1}
        options = {"max_grad_norm": 1.0, "warmup_steps": 2, "save_strategy": "steps"}
        trainer = transformers.Trainer(
            model,
            arguments(tmp_path, save_steps=2, **options),
            train_dataset=texts(),
            callbacks=[huggingface.BatchSizeCallback()],
            optimizer_cls_and_kwargs=(huggingface.whole_model, kwargs),
        )
        start = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2") if resumed else None)
        trained = [p for p in model.parameters() if p.requires_grad]
        kept = [p for p in model.parameters() if not p.requires_grad]
        assert all(map(torch.equal, frozen, kept))
        assert not any(map(torch.equal, start, trained))
        return trained, trainer.optimizer.optimizer

    (through, optimizer), (resumed, again) = train(resumed=False), train(resumed=True)
    assert all(map(torch.equal, through, resumed))
    assert optimizer.batch_size == again.batch_size > 1
    companions = {group.get("companion") for group in optimizer.param_groups}
    assert companions == ({None} if adapt is adapted else {None, "adamw"})
