"""Limits of a device's owner on a single order."""

from __future__ import annotations

import pytest

from attune.common.exchange.messages import Order
from attune.fedclient.limits import OrderLimits


@pytest.mark.parametrize(("epochs", "kept"), [(60, 30), (59, 0)])
def test_an_order_is_finished_if_twice_its_epochs_are_within_the_limit(epochs: int, kept: int) -> None:
    said: list[str] = []
    bounded = OrderLimits(epochs=epochs).bounded(Order("a", 1, "evaluate", finish_epochs=30), 0, said.append)
    assert bounded.finish_epochs == kept
    assert len(said) == (kept == 0) and all("up to 60 passes" in line for line in said)
