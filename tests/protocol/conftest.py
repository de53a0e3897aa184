"""A federation of real processes for the recorded peers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.harness import Federation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("recorded"))
    yield made
    made.close()
