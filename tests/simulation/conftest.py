"""Small federations: shards on disk."""

from pathlib import Path

import pytest

from tests.e2e.harness import digit_shards, tabular_shard


@pytest.fixture(scope="session")
def clouds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write four tables of different size."""
    folder = tmp_path_factory.mktemp("clouds")
    return {f"site-{n}": tabular_shard(folder / str(n), seed=n, samples=24 + 8 * n) for n in range(4)}


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write four shards of images."""
    return {f"site-{path.name}": path for path in digit_shards(tmp_path_factory.mktemp("digits"), 4, 30, 10)}
