"""Federations of real processes, ended with the test or the module that asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Federation, digit_shards


@pytest.fixture(scope="module")
def federation_at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Federation]]:
    """Makes federations, each in a folder of its own; every process they started is gone at the end."""
    made: list[Federation] = []

    def make(name: str) -> Federation:
        made.append(Federation(tmp_path_factory.mktemp(name)))
        return made[-1]

    yield make
    for federation in made:
        federation.close()


@pytest.fixture(scope="session")
def three_shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three devices, two digits each, 60 images to train and 20 to test."""
    return digit_shards(tmp_path_factory.mktemp("shards") / "three", 3, 60, 20)
