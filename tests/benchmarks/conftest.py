"""Processes of benchmarks are forked here, so that none of them imports torch anew."""

from collections.abc import Iterator

import pytest

from benchmarks import federation, processes
from tests import forked


@pytest.fixture(scope="session", autouse=True)
def _forked() -> Iterator[None]:
    with forked.instead_of_subprocess(federation, processes):
        yield
