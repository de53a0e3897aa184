"""Shards that many federations of real processes train on."""

from pathlib import Path

import pytest

from tests.e2e.harness import digit_shards


@pytest.fixture(scope="session")
def three_shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Make shards of three devices with two digits each, 60 images for training and 20 for testing."""
    return digit_shards(tmp_path_factory.mktemp("shards") / "three", 3, 60, 20)
