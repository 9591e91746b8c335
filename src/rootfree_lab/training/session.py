"""One training run as an object: everything that changes while it trains, and its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from rootfree_lab import models
from rootfree_lab import optimizers as optimizer_registry
from rootfree_lab.config.reading import ConfigError, plain_options
from rootfree_lab.config.settings import Config
from rootfree_lab.files import weights
from rootfree_lab.files.checkpoints import CheckpointError
from rootfree_lab.files.records import Record, describe, versions
from rootfree_lab.optimizers import peers
from rootfree_lab.training.checking import classifies, dataset_of
from rootfree_lab.training.divergence import Diverged, Losses
from rootfree_lab.training.feeding import Batch, Feed, in_order
from rootfree_lab.training.losses import count_correct, make_loss
from rootfree_lab.training.lr_schedules import base_rates, schedule_of, set_rates
from rootfree_lab.training.parallel import Ranks
from rootfree_lab.training.passes import GraphedPasses, Passes
from rootfree_lab.training.reproducibility import random_state, seed_everything, set_random_state
from rootfree_lab.training.running import Running
from rootfree_lab.training.watching.measures import Stopwatch, peak_bytes, reset_peak, state_bytes

Point = dict[str, float | int | None]

# The distance of the seeds of the ranks.
_APART = 1_000_003


class Session:
    """A run at some step: built from its config, moved by `step`, saved and restored whole."""

    def __init__(self, config: Config, device: torch.device, ranks: Ranks | None = None) -> None:
        self.config, self.device, self.ranks = config, device, ranks or Ranks()
        reset_peak(device)
        train = config.train
        seed_everything(train.seed)
        dataset = dataset_of(config.data)
        if dataset.graph is not None:
            # Moved once for training and tests: a model may cache what it computed from the graph.
            dataset = replace(dataset, graph=dataset.graph.to(device))
        self.kind: str = dataset.kind
        if train.graphs and self.kind == "graph":
            raise ConfigError("train.graphs must be false for graph data, got true")
        if train.channels_last and self.kind != "images":
            raise ConfigError(f"train.channels_last is for images, got true for {self.kind} data")
        if not self.ranks.alone and self.kind == "graph":
            raise ConfigError(
                f"train.parallel must be none for graph data, got {train.parallel!r}: a graph is "
                "one batch"
            )
        self.classifies = classifies(config)
        self._loss = make_loss(train, classes=dataset.classes, kind=dataset.kind)
        unsmoothed = replace(train, label_smoothing=0.0)  # tests use plain labels
        self._test_loss = make_loss(unsmoothed, classes=dataset.classes, kind=dataset.kind)
        self.model = models.build(config.model.name, dataset, **plain_options(config.model.options))
        if config.model.weights is not None:
            weights.load_(self.model, Path(config.model.weights), config.model.fresh)
        self.model.to(device).train()
        by_nodes = getattr(self.model, "takes_nodes", False)
        self.model = self.ranks.wrapped(self.model)
        augment = config.data.augment
        self.feed = Feed(dataset, train, device, augment=augment, by_nodes=by_nodes)
        self.test = in_order(dataset, train, device, by_nodes=by_nodes)
        self.terms = self.feed.terms
        self.optimizers: list[Optimizer] = optimizer_registry.build(
            config.optimizer.name,
            self.model,
            batch_size=self.terms,
            **plain_options(config.optimizer.options),
        )
        self._outside = peers.not_resumable(self.optimizers)
        if train.rollback and self._outside is not None:
            raise ConfigError(
                f"train.rollback must be 0 for {self._outside}, got {train.rollback}: it keeps "
                "state outside its state_dict"
            )
        self._base = base_rates(self.optimizers)
        self.schedule = schedule_of(config, steps_per_epoch=len(self.feed))
        self.total = self.schedule.total
        graphed = train.graphs and device.type == "cuda"
        self._passes = (
            GraphedPasses(self._with_loss, self.model) if graphed else Passes(self._with_loss)
        )
        self.watch = Stopwatch(device, parts=config.output.timing)
        self.running = Running.zero(device)
        self.loss: Tensor  # of the last step; the next one may write over it
        self.curve: list[Point] = []
        self.done = 0
        self.losses = Losses()
        self.kept: list[int] = []  # steps whose states are kept, to go back to
        self.rollbacks: list[Record] = []
        # Building draws random numbers, more for some optimizers than for others.
        seed_everything(train.seed + 1 + self.ranks.rank * _APART)

    # -- training ----------------------------------------------------------------------------

    def step(self) -> None:
        """One step: a batch through the model, its gradients through the optimizers."""
        watch = self.watch
        factor = self.rollbacks[-1]["factor"] if self.rollbacks else 1.0
        set_rates(self.optimizers, self._base, factor * self.schedule(self.done))
        with watch.part("data"):
            batch = self.ranks.part(self.feed.take())
        with watch.part("forward"):
            outputs, self.loss = self._passes.forward(batch)
        with watch.part("backward"):
            self._passes.backward()
            if self.config.train.clip_norm is not None:
                clip_grad_norm_(self.model.parameters(), self.config.train.clip_norm)
        self.running.count(self.loss, outputs, batch.target if self.classifies else None)
        if self.config.train.rollback:
            self.losses.count(self.loss)
        with watch.part("optimizer"):
            self._update()
        self.done += 1

    def _update(self) -> None:
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            self.check_losses()  # matrices that are not finite have no decomposition
            raise
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _with_loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = self._forward(batch, self.model)
        return outputs, self._loss(outputs, batch.target)

    def _forward(self, batch: Batch, model: nn.Module) -> Tensor:
        bf16, inputs = self.config.train.autocast == "bf16", batch.inputs
        if self.config.train.channels_last:
            inputs = tuple(x.contiguous(memory_format=torch.channels_last) for x in inputs)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16):
            outputs: Tensor = model(*inputs)
        return outputs if batch.select is None else outputs[batch.select]

    def why_not_deterministic(self) -> str | None:
        """Why torch refuses a deterministic step, tried on a copy of the model; None: it does not.

        The batch is the next one of training (a larger one may not fit), which then gets it again.
        """
        model = deepcopy(self.model)
        position = self.feed.position()
        batch = self.feed.take()
        self.feed.seek(position)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            try:
                self._loss(self._forward(batch, model), batch.target).backward()
            except RuntimeError as error:
                if "deterministic" not in str(error):
                    raise
                return str(error).partition(". ")[0]
        return None

    def check_losses(self) -> None:
        """Raise if a loss since the last point was not finite (waits for the device).

        A run that can go back also raises where its losses are far above what they were.
        """
        # All ranks must decide alike.
        if self.ranks.largest(not math.isfinite(self.running.loss.item())):
            raise Diverged(f"the training loss is not finite by step {self.done}")
        self.losses.look(self.done)

    # -- measuring ---------------------------------------------------------------------------

    def add_point(self) -> Point:
        """Evaluate, and add a point to the curve."""
        self.check_losses()
        self.watch.pause()
        self.running = self.running.of_all(self.ranks)
        point: Point = {
            "step": self.done,
            "epoch": self.done / len(self.feed),
            "seconds": self.watch.totals["total"],
            "train_loss": self.running.mean_loss(),
            "lr": float(self.optimizers[0].param_groups[0]["lr"]),
        }
        with self.watch.paused(count_as="evaluation"):
            test_loss, test_error = self.evaluate()
        point["test_loss"], point["test_error"] = test_loss, test_error
        self.curve.append(point)
        self.running = Running.zero(self.device)
        return point

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch] | None = None) -> tuple[float, float | None]:
        """Loss and error on the test set, or on these batches: means over examples or tokens."""
        self.model.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        count = 0
        for batch in self.test if batches is None else batches:
            outputs = self._forward(batch, self.model)
            loss += self._test_loss(outputs, batch.target) * batch.target.numel()
            count += batch.target.numel()
            if self.classifies:
                correct += count_correct(outputs, batch.target)
        self.model.train()
        if count == 0:
            raise ConfigError(f"the test set of {self.config.data.name} is empty")
        error = 1 - correct.item() / count if self.classifies else None
        return loss.item() / count, error

    def record(self, *, completed: bool) -> Record:
        """The run as one line of the records file."""
        last: Point = self.curve[-1] if self.curve else {}
        return {
            **describe(self.config),
            "versions": versions(self.device),
            "curve": self.curve,
            "final": {key: last.get(key) for key in ("train_loss", "test_loss", "test_error")},
            "seconds": self.watch.as_record(),
            "steps": self.done,
            "memory": {
                "peak_bytes": peak_bytes(self.device),
                "state_bytes": state_bytes(self.optimizers),
                "parameters": sum(p.numel() for p in self.model.parameters()),
            },
            "completed": completed,
            **({"rollbacks": self.rollbacks} if self.rollbacks else {}),
            **({} if self.ranks.alone else {"parallel": [self.ranks.mode, self.ranks.world]}),
        }

    # -- checkpoints -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """All that a bit-identical continuation needs. All ranks must call this."""
        return {
            "step": self.done,
            "model": self.ranks.model_state(self.model),
            "optimizers": [self.ranks.optimizer_state(each) for each in self.optimizers],
            "random": random_state(),
            "random_of_ranks": self.ranks.gathered(random_state()),
            "data": self.feed.position(),
            "running": self.running.of_all(self.ranks).state(),
            "curve": self.curve,
            "seconds": self.watch.totals,
            "rollback": [dict(vars(self.losses)), self.kept, self.rollbacks],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go to the step at which `state` was taken."""
        if self._outside is not None:
            raise CheckpointError(
                f"{self._outside} keeps state outside its state_dict: a resumed run would not be "
                "the same; start it again without --resume"
            )
        self.ranks.load_model(self.model, state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            self.ranks.load_optimizer(optimizer, saved)
        self.feed.seek(state["data"])
        self.running = Running.restored(state["running"], self.device, self.ranks)
        self.curve = state["curve"]
        self.watch.totals = state["seconds"]
        self.done = state["step"]
        losses, self.kept, self.rollbacks = state.get("rollback", ({}, [], []))
        self.losses = Losses(**losses)
        # Last, because building and seeking may have drawn random numbers.
        of_ranks = state.get("random_of_ranks", [state["random"]])
        if len(of_ranks) == self.ranks.world:
            set_random_state(of_ranks[self.ranks.rank])
        else:  # from another number of ranks: other numbers, but the same at every resumption
            seed_everything(self.config.train.seed + self.done + self.ranks.rank * _APART)

    def draw_anew(self, number: int) -> None:
        """Draw other random numbers for the rest of the run: the order of its data, dropout."""
        seed = self.config.train.seed + number * _APART
        self.feed.shuffle(seed)
        seed_everything(seed)
