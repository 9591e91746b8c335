"""Hugging Face's Trainer on the LoRA weights of a language model, with the batch size counted.

    python examples/trainer_lora.py

The model is made here, without a download: a two-layer Llama that learns to continue sequences
that count. Take `AutoModelForCausalLM.from_pretrained(...)` in its place. Needs
`pip install 'rootfree[integrations]'`.
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import rootfree
from rootfree.integrations.huggingface import BatchSizeCallback, whole_model

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--steps", type=int, default=100)
steps = parser.parse_args().steps

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=True,
)
lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(LlamaForCausalLM(config), lora)
model.print_trainable_parameters()

starts = torch.randint(32, (256, 1))
tokens = (starts + torch.arange(16)) % 32
data = [{"input_ids": each, "labels": each} for each in tokens]
trainer = Trainer(
    model,
    TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=steps,
        warmup_steps=steps // 10,
        logging_steps=max(1, steps // 5),
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=data,
    optimizer_cls_and_kwargs=(whole_model, {"method": rootfree.IFShampoo, "lr": 3e-2}),
    callbacks=[BatchSizeCallback()],
)
trainer.train()
optimizer = trainer.optimizer.optimizer
print(optimizer.summary().splitlines()[-1])
print(f"B = {optimizer.batch_size}: 16 sequences of 15 predicted tokens")
