"""Language models and data for the Trainer: tiny, random, made here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY, LENGTH = 32, 8


def texts(count: int = 10) -> list[dict[str, torch.Tensor]]:
    """Sequences of which a part that differs is to be learned."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for i in range(count):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[2 + i % 6 :] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def gpt2() -> Any:
    """The Trainer divides its loss by all labels, though the first ones are not predicted."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = {"n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout, **ends))


def llama() -> Any:
    """The Trainer divides its loss by the labels that are predicted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
        )
    )


class Classifier(nn.Module):
    """Is not told what the Trainer would divide by: the Trainer averages its means."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def vectors(count: int = 10) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(4, generator=generator), "labels": torch.tensor(i % 3)}
        for i in range(count)
    ]


def arguments(folder: Any, **options: Any) -> Any:
    """Two epochs of steps of six examples and one of four, unless told otherwise."""
    from transformers import TrainingArguments

    defaults = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "max_steps": 4,
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }
    return TrainingArguments(**{**defaults, **options})
