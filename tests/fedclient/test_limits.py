"""Limits of a device's owner on a single order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attune.common.errors import Forbidden
from attune.common.exchange.messages import Order
from attune.fedclient.address import ServerAddress
from attune.fedclient.limits import OrderLimits, check_sums
from attune.fedclient.options import DeviceOptions


@pytest.mark.parametrize(("epochs", "kept"), [(60, 30), (59, 0)])
def test_an_order_is_finished_if_twice_its_epochs_are_within_the_limit(epochs: int, kept: int) -> None:
    said: list[str] = []
    bounded = OrderLimits(epochs=epochs).bounded(Order("a", 1, "evaluate", finish_epochs=30), 0, said.append)
    assert bounded.finish_epochs == kept
    assert len(said) == (kept == 0) and all("up to 60 passes" in line for line in said)


def test_no_server_gets_sums_over_samples_that_the_owner_has_not_allowed() -> None:
    asked = Order("train-1-a", 1, "train", returns=("shared", "solved"))
    options = DeviceOptions(Path("shard"), ServerAddress("localhost", 1))
    with pytest.raises(Forbidden, match="asked for sums over samples; this device's owner allows none"):
        check_sums(asked, options)
    check_sums(asked, replace(options, disclose=("sums",)))
    check_sums(replace(asked, returns=("shared",)), options)
