"""Checks of what a run needs, before it is built."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from rootfree_lab import data, models, optimizers
from rootfree_lab.config.needed import check_packages
from rootfree_lab.config.reading import plain_options
from rootfree_lab.config.settings import Config, DataConfig
from rootfree_lab.files import weights
from rootfree_lab.training.feeding import Feed
from rootfree_lab.training.losses import make_loss
from rootfree_lab.training.lr_schedules import schedule_of


@lru_cache(maxsize=1)  # a comparison trains on one data set many times
def dataset_of(config: DataConfig) -> Any:
    """The data of a run, with its augmentation."""
    folder = None if config.folder is None else Path(config.folder)
    loaded = data.load(config.name, folder=folder, limit=config.limit, size=config.size)
    augmentation = replace(
        loaded.augmentation, resized=config.crop == "resized", erase=config.erase,
        anywhere=config.random_windows,
    )  # fmt: skip
    return replace(loaded, augmentation=augmentation)


def check(config: Config) -> None:
    """Raise if data or a package is missing, a name or an option unknown, or a run impossible.

    Builds no model.
    """
    check_packages(config.output)
    dataset = dataset_of(config.data)
    models.check(config.model.name, dataset, plain_options(config.model.options))
    if config.model.weights is not None:
        weights.check(Path(config.model.weights))
    make_loss(config.train, classes=dataset.classes, kind=dataset.kind)
    optimizers.check(config.optimizer.name, plain_options(config.optimizer.options))
    if dataset.kind != "graph":  # a model may ask for some of its nodes: known when it is built
        feed = Feed(dataset, config.train, torch.device("cpu"), augment=False)
        schedule_of(config, steps_per_epoch=len(feed))


def classifies(config: Config) -> bool:
    """Whether a run has an error beside its loss."""
    dataset = dataset_of(config.data)
    return bool(dataset.classes > 0 and dataset.kind != "text")
