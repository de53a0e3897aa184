"""Which federations have a closed form in their devices' blends, and what is said where it is missing."""

import json
from typing import Any

import msgspec
import pytest

from attune.common.plan import Columns, Plan, Profile, closed_form_words
from attune.fedserver.core.messages import Phase, Record, StrEnum
from attune.fedserver.core.orderbook import lacks_sums
from attune.fedserver.core.phases import PhaseKey
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.federation.streams import DeviceStage

IMAGES = Profile("images", (8, 8, 1), [3, 9], 100, 30)
TABLE = Profile("tabular", (2,), ["no", "yes"], 50, 9)
SCALED = Profile("tabular", (2,), ["no", "yes"], 50, 9, columns=Columns(50, [0.0, 1.0], [50.0, 90.0]))
AVERAGE = {"method": {"name": "fedavg"}}
MASKED: dict[str, Any] = {"privacy": {"secure_aggregation": True}}
FEW = "secure_aggregation cannot be combined with privacy.secure_devices = 4: sums over samples have at least 5 devices"


def plan_of(profile: Profile, settings: dict[str, Any] | None = None, sums: str = "ab", devices: str = "abc") -> Plan:
    return make_plan(resolve({**AVERAGE, **(settings or {})}), dict.fromkeys(devices, profile), "f", sums=sums)


@pytest.mark.parametrize("profile", [IMAGES, SCALED])
def test_two_devices_with_sums_are_enough(profile: Profile) -> None:
    plan = plan_of(profile)
    assert (plan.closed_form, plan.no_closed_form) == (True, "")
    assert closed_form_words(plan) == "the closed form of the devices' sums joins every device's blend"


@pytest.mark.parametrize(
    ("profile", "settings", "sums", "why"),
    [
        (IMAGES, {}, "a", "fewer than 2 of 3 devices allow it by --disclose sums"),
        (IMAGES, {}, "xy", "fewer than 2 of 3 devices allow it by --disclose sums"),
        (TABLE, {}, "ab", "devices have no common scale: it takes --standardise federation and --disclose statistics"),
        (IMAGES, {"privacy": {"unit": "example", "noise": 1.0}}, "ab", "with privacy.unit no sums over samples"),
        (IMAGES, MASKED, "abc", "behind masks it takes 5 devices"),
        (IMAGES, {"privacy": {**MASKED["privacy"], "secure_devices": 4}}, "abc", FEW),
        (IMAGES, {"round": {"mode": "buffered"}}, "ab", "buffered rounds have none"),
        (Profile("tokens", (5,), [0, 1], 50, 9, vocabulary=7), {}, "ab", "it is for images, series and tables"),
        (Profile("images", (80, 80, 1), [3, 9], 50, 9), {}, "ab", "at most 4,096 numbers of a sample, 100 outputs"),
        (Profile("images", (8, 8, 1), list(range(101)), 50, 9), {}, "ab", "at most 4,096 numbers of a sample, 100 outputs"),
        (Profile("tabular", (2,), ["x"], 50, 9, task="regression", columns=SCALED.columns), {}, "ab", "no common scale"),
    ],
)
def test_a_missing_closed_form_is_explained(profile: Profile, settings: dict[str, Any], sums: str, why: str) -> None:
    plan = plan_of(profile, settings, sums)
    assert not plan.closed_form and why in plan.no_closed_form
    assert closed_form_words(plan) == f"no closed form joins the devices' blends: {plan.no_closed_form}"


def test_behind_masks_every_device_must_be_in_its_first_sum() -> None:
    plan = plan_of(IMAGES, MASKED, sums="abcde", devices="abcde")
    assert plan.closed_form and closed_form_words(plan).endswith("later devices and new data are not in it")
    assert "1 of 5 devices were in such a sum before" in plan_of(IMAGES, MASKED, "abcd", "abcde").no_closed_form


@pytest.mark.parametrize(
    "settings",
    [
        {"round": {"analytic": "off"}},
        {"train": {"validation": 0.0}},
        {"method": {"name": "fedavg", "preset": "plain"}},
        {"method": {"name": "analytic"}},
    ],
)
def test_where_it_is_not_asked_for_nothing_is_said(settings: dict[str, Any]) -> None:
    assert closed_form_words(plan_of(IMAGES, settings)) == ""


def test_a_task_without_a_blend_has_none() -> None:
    """The Cox loss is no mean over samples."""
    assert closed_form_words(plan_of(Profile("tabular", (2,), ["time", "event"], 50, 9, task="survival"))) == ""


def test_sums_are_asked_for_once_and_again_where_the_state_with_them_was_taken_back() -> None:
    first, later = DeviceRecord("a", "key"), DeviceRecord("a", "key", contributed=4)
    assert lacks_sums(Record(round=0), None) and lacks_sums(Record(round=0), first)
    assert not lacks_sums(Record(round=4), later)
    back = Record(round=6, given_up=5, back_to=2)  # rounds 3 to 5 are given up
    assert lacks_sums(back, later)
    assert not lacks_sums(back, DeviceRecord("a", "key", contributed=2))
    assert not lacks_sums(back, DeviceRecord("a", "key", contributed=6))


# --- members of a StrEnum become their text in formatted strings, on every Python


@pytest.mark.parametrize("kind", [Phase, PhaseKey, DeviceStage])
def test_a_member_is_its_text(kind: type[StrEnum]) -> None:
    for member in kind:
        text = str.__str__(member)
        assert str(member) == f"{member}" == "%s" % member == "{}".format(member) == "".join([member]) == text  # noqa: UP031, UP032
        assert f"{member:>20}|{member!s}" == f"{text:>20}|{text}"
        assert type(str(member)) is str
        assert member == text and {text: 1}[member] == 1 and kind(text) is member
        assert json.dumps({"phase": member}) == json.dumps({"phase": text})
        assert msgspec.json.decode(msgspec.json.encode(member), type=kind) is member
