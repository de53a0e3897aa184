"""Verdict on a fleet, with numbers worked out by hand."""

import pytest

from attune.common.metrics import KEPT_RIVALS
from attune.fedserver.core.fleet_verdict import effect_of, fleet_verdicts


def report(better, worse, samples=20, rival="local", **more):
    names = KEPT_RIVALS[rival]
    return {"test_samples": samples, names.better: better, names.worse: worse} | more


def test_a_fleet_of_three_by_hand():
    [verdict] = fleet_verdicts({"a": report(4, 2), "b": report(6, 0), "c": report(0, 1)})
    # Gains: 0.1, 0.3, -0.05. Their mean is 0.35 / 3, their deviation 0.17559; t of two degrees is 4.3027.
    assert verdict.rival == "local" and verdict.gain == pytest.approx(0.116667, abs=1e-6)
    assert verdict.interval == pytest.approx((0.116667 - 0.436205, 0.116667 + 0.436205), abs=1e-4)
    assert (verdict.better, verdict.worse, verdict.p) == (2, 1, 1.0)
    assert verdict.words().startswith(
        "against a network trained alone: +0.117 on average, 95 % for devices like these -0.320 to +0.553;"
    )


def test_each_rival_has_a_verdict_and_a_device_needs_all_of_them():
    both = report(18, 0) | report(0, 18, rival="common")
    alone = {f"d{i}": report(15, 1) for i in range(6)}
    verdicts = fleet_verdicts({"both": both} | alone)
    assert [verdict.rival for verdict in verdicts] == ["local", "common"]
    assert effect_of(verdicts, "both") == "harmed", "the common model is better than what it keeps"
    assert effect_of(verdicts, "d0") == "helped" and effect_of(verdicts, "nobody") is None
    assert (verdicts[0].helped, verdicts[0].harmed, verdicts[1].harmed) == (7, 0, 1)


def test_ordinary_models_alone_come_first_and_a_common_model_as_good_hides_no_help():
    fleet = {f"d{i}": report(15, 1, rival="alone") | report(1, 1, rival="common") for i in range(6)}
    fleet["hurt"] = report(1, 19, rival="alone") | report(9, 0, rival="common")
    verdicts = fleet_verdicts(fleet)
    assert [verdict.rival for verdict in verdicts] == ["alone", "common"]
    assert verdicts[0].words().startswith("against the best ordinary model alone (scikit-learn): ")
    assert (effect_of(verdicts, "d0"), effect_of(verdicts, "hurt")) == ("helped", "harmed")


def test_devices_that_compared_nothing_are_left_out():
    assert fleet_verdicts({}) == [] and fleet_verdicts({"old": {"test_samples": 9, "better_than_local": 5}}) == []
    [verdict] = fleet_verdicts({"old": {}, "new": report(3, 1)})
    assert list(verdict.effects) == ["new"] and verdict.interval is None


def test_gains_that_do_not_differ_say_nothing_of_other_devices():
    [verdict] = fleet_verdicts({"a": report(1, 1), "b": report(3, 3)})
    assert verdict.interval is None and "for devices like these" not in verdict.words()


def test_a_difference_of_one_sample_is_never_called():
    [verdict] = fleet_verdicts({f"d{i}": report(1, 0) for i in range(200)})
    assert verdict.gain > 0 and verdict.helped == 0


def test_measured_gains_below_six_groups_are_never_called():
    names = KEPT_RIVALS["local"]
    measured = {names.gain: 0.4, names.error: 0.02}
    few, enough = (report(20, 0, **measured, test_groups=groups) for groups in (5, 6))
    [verdict] = fleet_verdicts({"few": few, **{f"d{i}": enough for i in range(4)}})
    assert verdict.effects["few"] is None and verdict.effects["d0"] == "helped"
    assert verdict.report()["helped"] == 4 and verdict.report()["devices"] == 5
