"""Client-level privacy: what is refused by name when the server starts, and the rounds whose devices are drawn in secret."""

from typing import Any

import msgspec
import numpy as np
import pytest

from attune.common.config import by_section, merge
from attune.common.errors import SettingError
from attune.common.methods.fit import check_model
from attune.common.methods.registry import configure, get
from attune.common.plan import Columns, ModelSpec, Profile
from attune.fedserver.core.client_privacy import PoissonRounds, check_secret
from attune.fedserver.core.messages import (
    Aggregate,
    Aggregated,
    Connected,
    Disconnected,
    Open,
    Phase,
    Record,
    Reported,
    Resumed,
    Tick,
)
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.core.round import step
from attune.fedserver.core.state import Round

CLIENT = {
    "method.name": "fedavg", "privacy.unit": "client", "privacy.noise": 1.0, "privacy.devices": 100, "round.clients": 10,
    "data.classes": [0, 1],
}  # fmt: skip
PROFILE = Profile("tabular", (6,), [0, 1], 60, 20)


def settings(**given: Any) -> Any:
    return resolve(merge(by_section(CLIENT), by_section(given)))


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"method.name": "fedtp", "method.embedding": "device"}, "FedTP was tried and has an accuracy of 0.65, FedPer of 0.83"),
        ({"method.name": "fedmcsa"}, "method fedmcsa has attended parts, of which each device gets another value"),
        ({"method.name": "fedtp"}, "method fedtp has generated parts"),
        ({"method.name": "local"}, "method local shares nothing"),
        ({"method.robust": "clip"}, "method.robust: it compares single updates"),
        ({"method.robust": "multi-krum"}, "method.robust"),
        ({"method.bound_change": 3.0}, "method.bound_change: it compares single updates"),
        ({"method.bound_samples": 5.0}, "method.bound_samples"),
        ({"server.max_update_norm": 1.0}, "server.max_update_norm"),
        ({"round.take_back": 10.0}, "round.take_back: it looks at losses"),
        ({"round.adapt_rounds": 1}, "round.adapt_rounds"),
        ({"round.train": "all"}, 'round.train = "all"'),
        ({"round.quorum": 5}, "round.quorum: only independent draws"),
        ({"round.over_selection": 0.3}, "round.over_selection: only independent draws"),
        ({"round.replace_after_s": 5.0}, "round.replace_after_s: only independent draws"),
        ({"round.attackers": 0.1}, "round.attackers"),
        ({"privacy.secure_aggregation": True}, "(privacy.secure_aggregation|round.min_clients)"),
        ({"privacy.devices": 0}, "needs privacy.devices"),
        ({"privacy.devices": 9}, "round.clients = 10 is more than privacy.devices = 9"),
        ({"privacy.unit": "none", "privacy.clip_quantile": 0.5}, "privacy.clip_quantile needs"),
        ({"privacy.noise": None}, "needs privacy.epsilon or privacy.noise"),
    ],
)
def test_what_depends_on_the_data_of_a_cohort_is_refused(given: dict[str, Any], answer: str) -> None:
    with pytest.raises(SettingError, match=answer) as refused:
        settings(**given)
    assert "privacy" in str(refused.value)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedbn", "fedrep", "fedbabu", "mr-mtl", "ditto", "pfedme"])
def test_defaults_that_compare_updates_are_off(method: str) -> None:
    resolved = settings(**{"method.name": method})
    bounds = [(one.bound_change, one.bound_samples) for one in resolved.configured.aggregators.values()]
    assert bounds == [(0.0, 0.0)] and resolved.round.take_back == 0


def test_buffers_that_devices_share_are_refused() -> None:
    spec = ModelSpec("tests.common.methods.batch_norm_model:normalised", "tabular", (6,), 2)
    privacy = settings().privacy
    with pytest.raises(SettingError, match=r"devices share norm\.running_mean, a statistic of their data"):
        check_model(spec, configure(get("fedavg"), {}), privacy=privacy)
    check_model(spec, configure(get("fedbn"), {}), privacy=privacy)


def test_the_plan_takes_nothing_from_the_data() -> None:
    columns = Columns(60, [1.0] * 6, [60.0] * 6)
    profiles = {name: msgspec.structs.replace(PROFILE, columns=columns, labels=[0]) for name in ("a", "b")}
    plan = make_plan(settings(), profiles, "f")
    assert plan.scale is None and plan.classes == [0, 1] and plan.expected_devices == 10
    numbers = msgspec.structs.replace(PROFILE, task="regression", labels=["y"], targets=Columns(60, [5.0], [60.0]))
    targets = make_plan(settings(), {"a": numbers}, "f").targets
    assert targets is not None and (targets.mean, targets.std) == ([0.0], [1.0])
    with pytest.raises(SettingError, match=r"needs data.classes: otherwise the plan would tell"):
        make_plan(settings(**{"data.classes": []}), profiles, "f")
    tokens = Profile("tokens", (8,), [0, 1], 60, 20, vocabulary=50)
    with pytest.raises(SettingError, match=r"needs data.vocabulary"):
        make_plan(settings(), {"a": tokens}, "f")


def test_the_noise_keeps_to_epsilon_and_agrees_with_the_accountant() -> None:
    pytest.importorskip("dp_accounting")
    given = {"privacy.noise": None, "privacy.epsilon": 3.0, "privacy.delta": 5e-4, "round.rounds": 20}
    plan = make_plan(settings(**given), {"a": PROFILE}, "f")
    from attune.common.privacy.accountant import NoisySteps, epsilon_of

    assert plan.privacy is not None and plan.privacy.noise is not None
    cost = epsilon_of([NoisySteps(0.1, plan.privacy.noise, 20)], 5e-4)
    assert 2.98 < cost <= 3.0
    with pytest.raises(SettingError, match=r"privacy.noise = 0.5 costs epsilon = .* and privacy.epsilon is 3"):
        make_plan(settings(**{**given, "privacy.noise": 0.5}), {"a": PROFILE}, "f")


def test_a_seed_is_for_simulations() -> None:
    with pytest.raises(SettingError, match=r"privacy\.insecure_seed protects nobody"):
        check_secret(settings(**{"privacy.insecure_seed": 1}).privacy)
    check_secret(settings().privacy)


def test_cohorts_are_poisson_samples() -> None:
    policy = settings(**{"privacy.insecure_seed": 5}).rules.policy
    assert isinstance(policy, PoissonRounds)
    names = [f"d{number:03}" for number in range(100)]
    cohorts = [policy.ask(Round(Record(round=number), connected=frozenset(names))).cohort for number in range(400)]
    sizes = np.array([len(cohort) for cohort in cohorts])
    assert sizes.mean() == pytest.approx(10, abs=0.75) and sizes.var() == pytest.approx(9, abs=3.2)
    drawn = np.array([[name in cohort for name in names] for cohort in cohorts]).T
    assert np.abs(np.corrcoef(drawn) - np.eye(100)).max() < 0.3
    fewer = [policy.ask(Round(Record(round=number), connected=frozenset(names[1:]))).cohort for number in range(400)]
    assert fewer == [tuple(name for name in cohort if name != names[0]) for cohort in cohorts]
    secret = settings().rules.policy
    state = Round(Record(), connected=frozenset(names))
    assert len({secret.ask(state) for _ in range(5)}) > 1


def opened(**given: Any) -> tuple[Any, Any]:
    """Return the rules, and the step with which round 1 opened on five devices of which all are drawn."""
    rules = settings(
        **{
            "privacy.devices": 5, "round.clients": 0, "round.min_clients": 5, "round.rounds": 2,
            "round.evaluate_each_last": 0, **given,
        }
    ).rules  # fmt: skip
    state = Round()
    for name in "abcde":
        taken = step(rules, state, Connected(name, 0))
        state = taken.state
    return rules, taken


def test_a_round_waits_for_each_device_by_itself() -> None:
    rules, taken = opened()
    assert taken.effects == (Open("train", 1, tuple("abcde")),)
    state = taken.state
    for name in "abcd":  # a quorum and two thirds have answered
        taken = step(rules, state, Reported(name, 1, 1.0))
        state = taken.state
    assert step(rules, state, Tick(200.0)).effects == ()
    gone = step(rules, state, Disconnected("e", 2.0)).state
    assert step(rules, gone, Connected("z", 20.0)).effects == (), "no device takes another one's place"
    assert step(rules, gone, Tick(33.0)).effects == (Aggregate(1, tuple("abcd")),)


def test_a_restart_keeps_the_cohort_that_was_drawn() -> None:
    rules = settings(**{"privacy.devices": 2, "round.clients": 1, "round.min_clients": 4}).rules
    for _ in range(20):
        state = Round()
        for name in "abcd":
            state = step(rules, state, Connected(name, 0)).state
        record = state.record
        if record.phase is Phase.TRAINING:
            again = step(rules, Round.of(record, set()), Resumed(0.0)).state
            assert (again.record.cohort, again.record.phase) == (record.cohort, Phase.TRAINING)


def test_a_round_without_any_answer_releases_noise_and_is_charged() -> None:
    rules, taken = opened(**{"privacy.devices": 10**9, "round.clients": 1, "privacy.epsilon": 8.0, "privacy.noise": 5.0})
    assert taken.effects == (Aggregate(1, ()),)
    taken = step(rules, taken.state, Aggregated(1.0))
    assert taken.state.record.releases == 1 and taken.effects == (Aggregate(2, ()),)
    again = step(rules, taken.state, Aggregated(2.0)).state
    assert again.record.releases == 2 and again.record.phase is Phase.EVALUATING
    restored = msgspec.structs.replace(again, record=msgspec.structs.replace(again.record, phase=Phase.WAITING, round=1))
    assert "privacy.epsilon is spent: 2 sums were released" in rules.policy.refuses(restored)
    assert not rules.policy.opens(restored)
