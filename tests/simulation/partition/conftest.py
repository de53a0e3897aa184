"""Data sets for tests."""

from collections.abc import Callable

import numpy as np
import pytest

from attune.simulation.partition.samples import Dataset


@pytest.fixture
def dataset_of() -> Callable[..., Dataset]:
    """Return a function of (train, test) counts per class. x holds each sample's number, so that samples can be identified."""

    def make(counts: list[tuple[int, int]], more: dict[str, np.ndarray] | None = None) -> Dataset:
        train_y, test_y = (np.repeat(np.arange(len(counts)) * 10, [pair[part] for pair in counts]) for part in (0, 1))
        train_x = np.arange(len(train_y), dtype=np.float64)[:, None]
        test_x = -1.0 - np.arange(len(test_y), dtype=np.float64)[:, None]
        classes = [c * 10 for c in range(len(counts))]
        return Dataset("made", "tabular", train_x, train_y, test_x, test_y, classes, 0, more=more or {})

    return make
