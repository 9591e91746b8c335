"""Lightning: a callback counts the batch size over accumulated batches.

    python examples/lightning_digits.py

Needs `pip install 'rootfree[integrations]'`.
"""

import argparse

import torch
from digits import accuracy, batches
from lightning import LightningModule, Trainer
from torch import Tensor, nn

import rootfree
from rootfree.integrations.lightning import BatchSizeCallback

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
parser.add_argument("--epochs", type=int, default=5)
epochs = parser.parse_args().epochs


class Digits(LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return rootfree.IFShampoo(rootfree.parameter_groups(self), lr=1e-2)


torch.manual_seed(0)
model = Digits()
trainer = Trainer(
    max_epochs=epochs,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    precision="bf16-mixed",
    callbacks=[BatchSizeCallback()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    accelerator="auto",
)
trainer.fit(model, batches(32))
print(
    f"B = {trainer.optimizers[0].batch_size}, test accuracy {accuracy(model.network.cpu()):.1f} %"
)
