"""Statistics of a shard that leave no device by themselves, and limits of its owner on a single order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attune.common.config import TrainSettings
from attune.common.errors import Forbidden, ShapeMismatch
from attune.common.exchange.messages import Order
from attune.common.plan import ModelSpec, Plan
from attune.fedclient.address import ServerAddress
from attune.fedclient.limits import OrderLimits, check_sums
from attune.fedclient.options import DeviceOptions

STATISTICS = {"columns", "targets"}


def plan_of(devices: int = 0) -> Plan:
    """Return a plan; with `devices` sums are masked, and of so many devices at least."""
    transforms = {"secure-sum-4": {"devices": devices}} if devices else {}
    return Plan("fed", 0, ModelSpec("mlr", "tabular", (3,), 2), [0, 1], "fedavg", {}, TrainSettings(), transforms=transforms)


@pytest.mark.parametrize("disclose", [(), ("statistics",)])
def test_sums_and_class_shares_leave_only_a_device_that_discloses_them(bench, disclose: tuple[str, ...]) -> None:
    (bench.shard / "meta.json").write_text('{"classes": ["ant", "bee", "cow"], "standardise": "federation"}')
    bench.run(disclose=disclose)
    told = [json.loads(hello.profile_json) for hello in bench.server.seen.hellos]
    assert told and [bool(profile["columns"]) for profile in told] == [bool(disclose)] * len(told)
    reports = [json.loads(update.metrics_json) for update in bench.server.seen.submits]
    assert len(reports) >= 3 and ["accuracy_constant" in report for report in reports] == [bool(disclose)] * len(reports)
    said = [report.get("above_constant") for report in reports]
    assert all("loss" in report for report in reports[:2]), "metrics of training go on"
    assert set(said[:-1]) == {None} and (said[-1] in (0, 1)) is not bool(disclose), "an evaluation says yes or no"
    [line] = [line for line in bench.lines.lines if "standardised" in line]
    assert "features are standardised by each device's own statistics: neither 5 devices nor all" in line


def test_sums_of_targets_stay_on_a_device_that_does_not_disclose_them(bench) -> None:
    for part in ("train", "test"):
        arrays = dict(np.load(bench.shard / f"{part}.npz"))
        np.savez(bench.shard / f"{part}.npz", x=arrays["x"], y=arrays["x"][:, :1] * 7 + 40)
    (bench.shard / "meta.json").write_text('{"task": "regression", "classes": ["dose"]}')
    with pytest.raises(ShapeMismatch, match="but the model is for"):  # this server asks for classes
        bench.run()
    told = [json.loads(hello.profile_json) for hello in bench.server.seen.hellos]
    assert told and all(not profile[name] for profile in told for name in STATISTICS)


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
        check_sums(asked, options, plan_of())
    check_sums(asked, replace(options, disclose=("sums",)), plan_of())
    check_sums(replace(asked, returns=("shared",)), options, plan_of())


def test_sums_among_fewer_than_five_devices_leave_no_device_even_behind_masks() -> None:
    asked = Order("train-1-a", 1, "train", returns=("shared", "solved"))
    options = DeviceOptions(Path("shard"), ServerAddress("localhost", 1), disclose=("sums",))
    check_sums(asked, replace(options, disclose=()), plan_of(devices=5))
    with pytest.raises(Forbidden, match="asked for sums over samples"):
        check_sums(asked, options, plan_of(devices=4))
