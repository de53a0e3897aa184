"""A federation of real processes for the recorded peers."""

import pytest

from tests.e2e.harness import Federation, FederationAt


@pytest.fixture(scope="module")
def federation(federation_at: FederationAt) -> Federation:
    return federation_at("recorded")
