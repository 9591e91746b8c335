"""Records such as training writes, made up: loss curves that fall like those of real runs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

# label: lr, how fast it learns, where it ends, optimizer's ms per step, bytes of state per weight
METHODS = {
    "SGD": (0.1, 0.7, 0.062, 0.4, 4),
    "AdamW": (1e-3, 1.0, 0.071, 0.9, 8),
    "RFRMSprop": (3e-3, 1.1, 0.064, 0.8, 8),
    "Shampoo": (5e-3, 1.4, 0.058, 9.5, 20),
    "IFShampoo": (5e-3, 1.6, 0.051, 4.2, 20),
}
PARAMETERS = 21_000_000


def record(
    label: str = "AdamW", *, seed: int = 0, data: str = "cifar10", model: str = "resnet34",
    epochs: int = 30, batch_size: int = 128, **changes: Any,
) -> dict[str, Any]:  # fmt: skip
    lr, speed, floor, own, state = METHODS.get(label, (0.01, 1.0, 0.1, 1.0, 8))
    chance = random.Random(repr((label, seed, data, model)))
    text = data == "sotu"
    scale = 1.0 if model == "resnet34" else 1.9
    forward, backward, loading = 4.1 * scale, 8.3 * scale, 0.6
    per_step = (forward + backward + loading + own) / 1000
    per_epoch = 390
    floor *= scale * chance.uniform(0.96, 1.04)
    curve = []
    for point in range(1, 2 * epochs + 1):
        epoch = point / 2
        step = round(epoch * per_epoch)
        decay = math.exp(-speed * 6 * epoch / epochs) * chance.uniform(0.93, 1.07)
        train = 2.3 * decay + 0.02 * scale * chance.uniform(0.9, 1.1)
        error = floor + 0.55 * decay
        curve.append(
            {
                "step": step,
                "epoch": epoch,
                "seconds": step * per_step * chance.uniform(0.99, 1.01),
                "train_loss": train,
                "lr": lr * (1 + math.cos(math.pi * epoch / epochs)) / 2,
                "test_loss": train * 0.7 + 3.2 * floor,
                "test_error": None if text else error,
            }
        )
    steps = epochs * per_epoch
    last = curve[-1]
    content = {
        "label": label,
        "config": {
            "data": {"name": data, "augment": True},
            "model": {"name": model, "options": {}},
            "optimizer": {"name": label, "lr": lr, "weight_decay": 5e-4},
            "schedule": {"name": "cosine", "warmup_epochs": 1},
            "train": {"epochs": epochs, "batch_size": batch_size, "loss": "cross_entropy",
                      "autocast": "none", "seed": seed, "device": "cpu"},
        },
        "seed": seed,
        "versions": {"rootfree": "0.1.0", "torch": "2.13.0", "python": "3.11.2", "device": "cpu"},
        "curve": curve,
        "final": {key: last[key] for key in ("train_loss", "test_loss", "test_error")},
        "seconds": {"total": steps * per_step * 1.04, "forward": steps * forward / 1000,
                    "backward": steps * backward / 1000, "optimizer": steps * own / 1000,
                    "data": steps * loading / 1000},
        "steps": steps,
        "memory": {"peak_bytes": round(1.9e9 * scale) + state * PARAMETERS,
                   "state_bytes": state * PARAMETERS, "parameters": PARAMETERS},
        "data": data,
        "model": model,
        "optimizer": label,
        "completed": True,
    }  # fmt: skip
    return {**content, **changes}


def comparison() -> list[dict[str, Any]]:
    """Five methods, three seeds, two experiments; one run diverged and one was stopped."""
    experiments = [("cifar10", "resnet34"), ("cifar100", "vit_tiny")]
    runs = [
        record(label, seed=seed, data=data, model=model)
        for data, model in experiments
        for label in METHODS
        for seed in range(3)
    ]
    diverged = runs[5]  # AdamW, seed 2
    for point in diverged["curve"][20:]:
        point.update(train_loss=math.nan, test_loss=math.nan, test_error=0.9)
    diverged["final"] = {"train_loss": math.nan, "test_loss": math.nan, "test_error": 0.9}
    stopped = runs[25]  # Shampoo, seed 1, second experiment
    stopped.update(curve=stopped["curve"][:30], final={}, completed=False)
    return runs


def write(file: Path, records: list[dict[str, Any]], *, tail: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(content) + "\n" for content in records]
    file.write_text("".join(lines) + tail, encoding="utf-8")
    return file
