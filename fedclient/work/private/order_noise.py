"""Randomness and bounds of one order that trains with noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attune.common.privacy.noise import NoiseStream, key_of

AT_ONCE = 1 << 14  # units that are drawn at a time


@dataclass
class OrderNoise:
    """Noise of one device in one order.

    Attributes:
        clip: Largest L2 norm of a unit's gradient.
        noise: Deviation of the noise in units of `clip`.
        key: Secret key of this order. No other order has it.
        charged: Steps that the ledger has charged for this order.
        groups: Number of each sample's group, (N,) int64, from 0; None: each sample is a unit of its own.
        metrics: Noise multiplier of the order's metrics; 0: they do not leave the device.
    """

    clip: float
    noise: float
    key: bytes = field(repr=False)
    charged: int
    groups: Tensor | None = None
    metrics: float = 0.0
    taken: int = 0

    def stream(self, *purpose: str) -> NoiseStream:
        """Return the random numbers for one purpose."""
        return NoiseStream(key_of(self.key, *purpose))

    def units(self, samples: int) -> int:
        """Return the number of units of so many samples."""
        return samples if self.groups is None else int(self.groups.max()) + 1

    def batches(self, samples: int, batch_size: int, steps: int, purpose: str) -> Iterator[Tensor]:
        """Yield the indices (B,) of each step: every unit is in it with the same chance, independently; B may be 0.

        Args:
            samples: Samples of the device.
            batch_size: Samples of a step on average.
            steps: Number of steps.
            purpose: Names the draw.

        Raises:
            RuntimeError: So many steps were not charged.
        """
        self.taken += steps
        if self.taken > self.charged:
            raise RuntimeError(f"{self.taken} steps with noise were begun, and {self.charged} are charged")
        stream, units, rate = self.stream("batches", purpose), self.units(samples), rate_of(samples, batch_size)
        many = max(1, AT_ONCE // units)
        for step in range(steps):
            if step % many == 0:
                drawn_SU = stream.uniform(many * units).view(many, units) <= rate
            drawn = drawn_SU[step % many]
            yield torch.nonzero(drawn if self.groups is None else drawn[self.groups]).flatten()


def rate_of(samples: int, batch_size: int) -> float:
    """Return the chance of a unit to be in a step."""
    return min(1.0, batch_size / samples)
