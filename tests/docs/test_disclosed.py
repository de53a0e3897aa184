"""Every field that a device sends has a decision in docs/disclosed.toml, and the code does what the decisions say."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from attune.common.exchange.transform import SUMMED
from attune.common.methods import registry
from attune.common.metrics import METRICS, Metrics, reported_by
from attune.common.plan import Columns, Profile
from attune.fedclient.disclosing import told_profile
from attune.fedclient.exchanges import report_of
from attune.fedclient.limits import PrivacyLimits
from attune.fedclient.messages import OrderResult
from attune.fedserver.core.adaptation import adaptation_of
from docs.disclosed import Decision, decisions, fields_sent

VALUES: dict[str, Any] = {name: "local" if name == "kept" else 1 for name in METRICS}
RESULT = OrderResult(order_id="train-1", round=1, trained=True, samples=40, fitted={"forest": -9.5}, **VALUES)


@pytest.fixture(scope="module")
def decided() -> dict[str, Decision]:
    return {field: decision for decision in decisions() for field in decision.fields}


def test_every_field_of_every_message_of_a_device_has_one_decision() -> None:
    listed = Counter(field for decision in decisions() for field in decision.fields)
    sent = fields_sent()
    assert {"Hello.software", "Profile.labels", "Columns.mean", "Metrics.loss", "Frame", "BlobRef.data"} <= sent
    assert sorted(sent - set(listed)) == [], "fields without a decision: give each a row in docs/disclosed.toml"
    assert sorted(set(listed) - sent) == [], "decisions about fields that no message has"
    assert [field for field, count in listed.items() if count > 1] == []


def metrics_with(decided: dict[str, Decision], mode: str, *words: str) -> set[str]:
    return {name for name in METRICS if getattr(decided[f"Metrics.{name}"], mode) in words}


def test_the_metrics_that_leave_are_those_that_are_decided(decided: dict[str, Decision]) -> None:
    usual = set(reported_by(RESULT.without_class_shares)) | {"above_constant"}  # in evaluations
    assert metrics_with(decided, "usual", "sent") | {"epsilon"} == usual  # without noise there is no epsilon
    private = set(reported_by(RESULT.without_class_shares.without_scores))
    assert metrics_with(decided, "noise", "sent") == private
    assert metrics_with(decided, "secure", "masked") == set(SUMMED)
    assert RESULT.without_class_shares.fitted == RESULT.fitted and decided["Metrics.fitted"].usual == "sent"
    assert RESULT.without_scores.fitted == report_of(RESULT).fitted == {}, "neither with noise nor beside masked sums"
    assert reported_by(report_of(RESULT)) == {}
    assert report_of(RESULT).samples == 0 and decided["Update.samples"].secure == "masked"


@pytest.mark.parametrize("disclose", [(), ("statistics",)])
def test_the_profile_that_leaves_is_the_one_that_is_decided(decided: dict[str, Decision], disclose: tuple[str, ...]) -> None:
    sums = Columns(3, [0.0], [1.0])
    profile = Profile("tabular", (1,), ["a"], 9, 9, 9, True, sums, ["age"], "regression", sums)
    assert None not in msgspec.structs.astuple(profile)
    options = cast(Any, SimpleNamespace(disclose=disclose, privacy=PrivacyLimits()))
    said = msgspec.structs.asdict(told_profile(options, cast(Any, SimpleNamespace(profile=profile))))
    withheld = {name for name, value in said.items() if value is None}
    assert withheld == (set() if disclose else {name for name in said if decided[f"Profile.{name}"].usual == "disclosed"})


def test_a_new_field_without_a_decision_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Grown(Metrics, frozen=True, kw_only=True):
        """Metrics of a later version."""

        birthday: int | None = None

    monkeypatch.setattr("docs.disclosed.Metrics", Grown)
    assert "Grown.birthday" in fields_sent()


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
