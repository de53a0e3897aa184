"""Every field that a device sends has a decision in fedclient/disclosed.toml, and the gate does what the decisions say."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attune.common.config import PrivacySettings, TrainSettings
from attune.common.exchange import messages
from attune.common.exchange.transform import SUMMED
from attune.common.methods import registry
from attune.common.metrics import FALSE_RATES, METRICS, OtherScore, reported_by
from attune.common.plan import Columns, ModelSpec, Plan, Profile
from attune.common.schema import Schema
from attune.fedclient import gate as gates
from attune.fedclient.address import ServerAddress
from attune.fedclient.gate import Gate, PrivacyLimits, decisions, rows, with_rows
from attune.fedclient.messages import OrderResult
from attune.fedclient.options import DeviceOptions
from attune.fedserver.core.adaptation import adaptation_of
from docs.disclosed import fields_sent

VALUES: dict[str, Any] = {name: "local" if name == "kept" else 1 for name in METRICS}
RESULT = OrderResult(
    order_id="e-1", round=1, trained=False, samples=40, fitted={"forest": -9.5}, noisy={"loss": 0.5, "epsilon": 9.0},
    roc={"kept": (0.5,) * len(FALSE_RATES)}, others={"lund": OtherScore(score=0.5)}, **VALUES,
)  # fmt: skip
SUMS, SCHEMA = Columns(3, [0.0], [1.0]), Schema(columns={})
PROFILE = Profile("tabular", (1,), ["a"], 9, 9, 9, True, SUMS, ["age"], "classes", SUMS, SCHEMA, SCHEMA, True, "small", "icu")
PLANS: dict[str, dict[str, Any]] = {
    "usual": {},
    "noise": {"privacy": PrivacySettings(unit="example", epsilon=4.0)},
    "secure": {"transforms": {"secure-sum-4": {}}},
}
FREE = ("sent", "noisy", "masked")  # what the owner need not allow, or what no owner is asked for
MESSAGES = {name: kind for name, kind in vars(messages).items() if getattr(kind, "__module__", "") == messages.__name__}


def gate_of(mode: str = "usual", **options: Any) -> Gate:
    """Return the gate of a device that allows nothing, unless the options say otherwise."""
    spec, owner = ModelSpec("mlr", "tabular", (1,), 2), PrivacyLimits(metrics="none")
    given = {"privacy": owner, "units": "none"} | options
    plan = Plan("f", 0, spec, [0, 1], "fedavg", {}, TrainSettings(), **PLANS[mode])
    return Gate(DeviceOptions(Path(), ServerAddress("localhost", 1), **given), plan)


OPEN = {"privacy": PrivacyLimits(metrics="all"), "units": "all", "disclose": ("statistics",)}


REF, FILLED = messages.BlobRef("x", "x", 1, data=b"x"), {"str": "x", "bytes": b"x", "int": 1, "float": 1.0}


def filled(kind: Any) -> Any:
    """Return a message with something in every field."""
    return kind(**{name: FILLED.get(kind.__annotations__[name], (REF,)) for name in kind.__struct_fields__})


def test_every_field_of_every_message_of_a_device_has_one_decision() -> None:
    listed_fields = Counter(field for decision in decisions() for field in decision.fields)
    sent = fields_sent()
    assert {"Hello.software", "Profile.labels", "Columns.mean", "Metrics.loss", "Frame", "BlobRef.data"} <= sent
    assert sorted(sent - set(listed_fields)) == [], "fields without a decision: give each a row in fedclient/disclosed.toml"
    assert sorted(set(listed_fields) - sent) == [], "decisions about fields that no message has"
    assert [field for field, count in listed_fields.items() if count > 1] == []


@pytest.mark.parametrize("mode", ["usual", "noise"])
def test_without_permission_only_free_fields_of_profile_and_metrics_leave(mode: str) -> None:
    gate = gate_of(mode)
    free = {field for field in fields_sent() if getattr(rows()[field], mode) in FREE}
    for declares, declared in (((), set()), (("classes", "vocabulary"), {"Profile.labels", "Profile.vocabulary"})):
        said = gate.profile(PROFILE, declares)
        left = {f"Profile.{name}" for name in Profile.__struct_fields__ if getattr(said, name) == getattr(PROFILE, name)}
        assert left == {field for field in free if field.startswith("Profile.")} | declared
    report = gate.report(msgspec.structs.replace(RESULT, noisy={}))
    assert {f"Metrics.{name}" for name in reported_by(report)} == {field for field in free if field.startswith("Metrics.")}
    assert report.fitted == report.roc == {}
    assert (noisy := gate.report(RESULT)).loss == 0.5 and noisy.epsilon == report.epsilon, "only what is charged is sent"


def test_of_a_summed_update_the_server_is_told_only_that_it_is_done() -> None:
    report = gate_of("secure", **OPEN).report(msgspec.structs.replace(RESULT, trained=True))
    assert report == OrderResult(order_id="e-1", round=1, trained=True, samples=0)
    assert {name for name in METRICS if rows()[f"Metrics.{name}"].secure == "masked"} == set(SUMMED)


@pytest.mark.parametrize("mode", PLANS)
def test_every_field_needs_what_its_row_says(mode: str) -> None:
    closed, opened = gate_of(mode), gate_of(mode, **OPEN)
    for field in fields_sent():
        of_order = field.startswith(("Metrics.", "Trouble."))
        word = getattr(rows()[field], "usual" if of_order and mode == "secure" else mode)
        assert closed.allows(field) is (word in FREE), field
        assert opened.allows(field) is (word not in ("not sent", "declared")), field


def test_a_new_field_is_not_sent_until_it_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the row of each field away in turn, from an owner who allows everything."""
    known, gone = rows(), ""
    monkeypatch.setattr(gates, "rows", lambda: {name: row for name, row in known.items() if name != gone})
    gate, profile = gate_of(**OPEN), msgspec.structs.replace(PROFILE, task="regression")
    for field in fields_sent():
        gone, (kind, _, name) = field, field.partition(".")
        if kind == "Profile":
            assert getattr(gate.profile(profile, ()), name) != getattr(profile, name), field
        elif kind == "Metrics":
            assert getattr(gate_of(**OPEN).report(RESULT), name) != getattr(RESULT, name), field
        elif kind in MESSAGES:
            assert not getattr(with_rows(filled(MESSAGES[kind])), name), field
    gone = "BlobRef.data"
    assert not with_rows(filled(messages.Update)).parts[0].data, "nor is that of a message within a message"


# --- the documents on each method, compared with the registry

CONFIGURED = {name: registry.configured_from({"name": name}) for name in registry.names()}


def test_what_newcomers_of_each_method_train_is_described(page: Any) -> None:
    rows = page("docs/operations/rounds.md").table("## Newcomers")
    described = {what: set(re.findall(r"`([\w+-]+)`", methods)) for methods, what, *_ in rows[4:]}
    nothing = {name for name, configured in CONFIGURED.items() if adaptation_of(configured, "personal") is None}
    assert described[next(what for what in described if what.startswith("no part"))] == nothing
    single = {name for name in CONFIGURED if "+" not in name and not name.startswith("fedtp-")}
    assert set().union(*described.values()) >= single


def test_each_method_that_refuses_a_loop_of_the_users_own_is_named(page: Any) -> None:
    [said] = re.findall(r"^- (.*?) refuse a loop of your own", page("docs/own-training.md").text, re.MULTILINE)
    refusing = {name.partition("+")[0] for name, configured in CONFIGURED.items() if configured.objective.own_loop}
    assert {name.lower() for name in re.split(r", | and ", said)} == refusing
