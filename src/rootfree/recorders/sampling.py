"""Random numbers of the recorders: their own stream, so that recording does not change training."""

from __future__ import annotations

import torch

from rootfree.recorders.ranks import Ranks


class Draws:
    """A generator on each device that asks, seeded apart on each rank."""

    def __init__(self, seed: int | None, ranks: Ranks) -> None:
        self._seed = seed
        self._ranks = ranks
        self._generators: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of a device.

        Ranks hold different examples: the same draws on all of them would be correlated, and the
        sum of what they sampled biased.
        """
        if device not in self._generators:
            seed = torch.initial_seed() if self._seed is None else self._seed
            generator = torch.Generator(device)
            generator.manual_seed((seed + self._ranks.rank) % 2**63)
            self._generators[device] = generator
        return self._generators[device]
