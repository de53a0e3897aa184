"""Statistics of a shard that leave no device by themselves, and limits of its owner on a single order."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attune.common.config import TrainSettings
from attune.common.errors import Forbidden, ShapeMismatch, ShardError
from attune.common.exchange.messages import Order
from attune.common.plan import ModelSpec, Plan
from attune.fedclient.address import ServerAddress
from attune.fedclient.gate import Gate, PrivacyLimits
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


def test_no_server_gets_sums_over_samples_that_the_owner_has_not_allowed() -> None:
    asked = Order("train-1-a", 1, "train", returns=("shared", "solved"))
    options = DeviceOptions(Path("shard"), ServerAddress("localhost", 1))
    with pytest.raises(Forbidden, match="asked for sums over samples; this device's owner allows none"):
        Gate(options, plan_of()).check_sums(asked)
    Gate(replace(options, disclose=("sums",)), plan_of()).check_sums(asked)
    Gate(options, plan_of()).check_sums(Order("train-1-a", 1, "train", returns=("shared",)))


def test_sums_among_fewer_than_five_devices_leave_no_device_even_behind_masks() -> None:
    asked = Order("train-1-a", 1, "train", returns=("shared", "solved"))
    options = DeviceOptions(Path("shard"), ServerAddress("localhost", 1), disclose=("sums",))
    Gate(replace(options, disclose=()), plan_of(devices=5)).check_sums(asked)
    with pytest.raises(Forbidden, match="asked for sums over samples"):
        Gate(options, plan_of(devices=4)).check_sums(asked)


@pytest.mark.parametrize("limits", [PrivacyLimits(epsilon=4.0), PrivacyLimits(metrics="none")])
def test_why_a_device_takes_no_part_quotes_no_cell_where_scores_stay(limits: PrivacyLimits) -> None:
    error = ShardError("diagnosis of a.csv is text, such as 'flu' in sample 17")
    options = DeviceOptions(Path("shard"), ServerAddress("localhost", 1), privacy=limits)
    assert "flu" not in Gate(options, plan_of()).declined(error)
