"""Federations of real processes, which end with the test or the module that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Federation, digit_shards


@pytest.fixture(scope="module")
def federation_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Federation]]:
    """Return a function that makes federations, each in a folder of its own. All their processes are gone at the end."""
    made: list[Federation] = []

    def make(name: str) -> Federation:
        made.append(Federation(tmp_path_factory.mktemp(name)))
        return made[-1]

    yield make
    for federation in made:
        federation.close()


@pytest.fixture(scope="session")
def three_shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Make shards of three devices with two digits each, 60 images for training and 20 for testing."""
    return digit_shards(tmp_path_factory.mktemp("shards") / "three", 3, 60, 20)
