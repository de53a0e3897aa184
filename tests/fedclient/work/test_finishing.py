"""Finishing: before its last evaluation a device fine-tunes its models for itself alone, and blends them with the others."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

import attune
from attune.common.config import TrainSettings
from attune.common.errors import SettingError
from attune.common.metrics import Choice
from attune.fedclient.gate import Gate
from attune.fedclient.model.artifact import Model
from attune.fedclient.work.baselines import Baselines
from attune.fedclient.work.blend import pseudo_counts
from attune.fedclient.work.evaluation import Evaluation
from attune.fedclient.work.objectives.descent import TrainingDiverged
from attune.fedserver.core.finishing import FINISH_EPOCHS, FINISH_STOPS, lengthened

ROUNDS = 2
LONGEST = 60  # epochs of the devices below, which have one or two batches
SETTINGS: dict[str, Any] = {"model.name": "mlr", "train.local_epochs": 1, "train.lr": 0.05, "round.evaluate_every": 1}


def cloud(seed: int, samples: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Return three clouds of four features that overlap, turned by a different angle for each device."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, samples)
    return (np.roll(np.eye(4), seed % 3, axis=1)[y] * 2 + rng.normal(size=(samples, 4))).astype(np.float32), y


CLOUDS = {f"site{n}": cloud(n) for n in range(3)}
OVERFITS = {"model.name": "dnn", "model.hidden": [64], "train.lr": 0.3}
NUMBERS = {
    name: (x, np.random.default_rng(at).normal(size=len(x)).astype(np.float32))
    for at, (name, (x, _)) in enumerate(CLOUDS.items())
}


def run(method: str = "fedper", finish: str | None = "auto", data: Any = CLOUDS, **more: Any) -> attune.SimulationResult:
    settings = SETTINGS | ({"train.finish": finish} if finish else {}) | more.pop("settings", {})
    return attune.simulate(data, method, rounds=ROUNDS, seed=3, settings=settings, progress=False, **more)


@pytest.fixture(scope="module")
def finished() -> attune.SimulationResult:
    return run("fedavg")


def test_nothing_is_sent_for_it(finished: attune.SimulationResult) -> None:
    """The server's state, the bytes, and what devices report of their other models are the same."""
    plain = run("fedavg", "off")
    assert finished.digests == plain.digests and finished.bytes_moved == plain.bytes_moved
    for one, other in zip(finished.status["clients"], plain.status["clients"], strict=True):
        for name in ("accuracy", "accuracy_common", "likelihood_common", "better_than_local"):
            assert one[name] == other[name]


@pytest.mark.parametrize("finish", ["auto", "off"])
def test_devices_with_a_dial_vote_if_they_will_finish(finish: str) -> None:
    """Ask each device in the evaluation before the last one, in which nobody finishes yet."""
    result = run("fedmcsa", finish, settings={"method.dial": True}, baseline="local")
    before = [row for row in result._outcome.snapshot.rows if (row.work, row.round) == ("evaluate", ROUNDS - 1)]
    assert len(before) == len(CLOUDS) and all(row.dial_own is not None for row in before)
    assert {row.likelihood_personalized is not None for row in before} == {finish == "auto"}


@pytest.mark.parametrize(("rates", "rate"), [({}, 0.05), ({"train.finish_lr": 0.2, "train.lr_decay": 0.5}, 0.2)])
def test_the_finished_model_is_plain_training_from_what_was_served(
    monkeypatch: pytest.MonkeyPatch, rates: dict[str, float], rate: float
) -> None:
    """Sixty full steps of momentum SGD with clipped gradients, derived by hand in float64, end at its weights."""
    seen: list[tuple[Any, Any, Any]] = []
    before = Baselines.finished

    def recorded(self: Baselines, tensors: Any, data: Any, *rest: Any) -> Any:
        tuned = yield from before(self, tensors, data, *rest)
        seen.append((tensors, data, tuned))
        return tuned

    monkeypatch.setattr(Baselines, "finished", recorded)
    run("fedavg", settings={"train.batch_size": 1000} | rates, executor="sequential")
    assert len(seen) == len(CLOUDS)
    for start, data, tuned in seen:
        (w_name, w), (b_name, b) = ((name, tensor.double().numpy().copy()) for name, tensor in start.items())
        x, y = data.train_x.double().numpy().reshape(len(data.train_x), -1), np.eye(3)[data.train_y.numpy()]
        momentum = [np.zeros_like(w), np.zeros_like(b)]
        for _ in range(LONGEST):
            scores = np.exp(x @ w.T + b)
            error = (scores / scores.sum(1, keepdims=True) - y) / len(x)
            gradients = [error.T @ x, error.sum(0)]
            norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients))
            for at, gradient in enumerate(gradients):
                momentum[at] = 0.9 * momentum[at] + gradient / max(1.0, norm)
            w, b = w - rate * momentum[0], b - rate * momentum[1]
        assert tuned[w_name].numpy() == pytest.approx(w, abs=1e-5) and tuned[b_name].numpy() == pytest.approx(b, abs=1e-5)


def test_only_the_last_evaluation_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recorded_orders(monkeypatch)
    run("fedavg")
    assert sorted({order[:2] for order in asked}) == [(1, 0), (ROUNDS, LONGEST)]
    asked.clear()
    run("fedavg", "off")
    assert {epochs for _, epochs, _ in asked} == {0}


@pytest.mark.parametrize(
    ("samples", "batch_size", "stops", "last"),
    [
        (20, 32, (20,), 60),  # 18 samples are one batch: 120 steps would be 120 epochs
        (80, 32, (20,), 40),  # 72 are three batches
        (160, 32, (5, 10, 20), 24),  # 144 are five
        (1000, 32, (20,), 20),  # 900 are 29: twenty epochs have more than 120 steps
        (20, 32, (5,), 5),  # the fleet has chosen five
        (20, 4, (20,), 24),
    ],
)
def test_devices_with_few_batches_finish_for_more_epochs(
    samples: int, batch_size: int, stops: tuple[int, ...], last: int
) -> None:
    train = TrainSettings(batch_size=batch_size, validation=0.1, finish="auto")
    assert lengthened(stops, train, samples) == (*stops[:-1], last)
    assert lengthened((), train, samples) == ()


def test_the_plan_says_nothing_of_it_so_that_older_devices_can_read_it() -> None:
    plan = run("fedavg", "auto", settings={"train.finish_stop": "fleet"})._outcome.snapshot.plan
    assert plan is not None and plan.train.finish is msgspec.UNSET and plan.train.finish_stop is msgspec.UNSET


@pytest.mark.parametrize(
    ("method", "baseline", "names"),
    [
        ("fedper", None, {"personalized", "finished-personalized"}),
        ("fedmcsa", None, {"personalized", "common", "finished-personalized", "finished-common"}),
        ("fedavg", "local", {"common", "local", "finished-common"}),
        ("local", None, {"local"}),
    ],
)
def test_which_models_are_finished(method: str, baseline: Any, names: set[str]) -> None:
    more = {} if method != "fedper" else {"settings": {"model.name": "dnn", "model.hidden": [8]}}
    result = run(method, baseline=baseline, **more)
    assert {frozenset(result.model(device).members) for device in result.devices} == {frozenset(names)}


@pytest.mark.parametrize("alike", [True, False])
def test_a_common_model_that_is_far_behind_is_not_finished(alike: bool) -> None:
    """Give each device other names for twenty classes, so that the mean of all models is more than two nats worse."""
    data = {}
    for site in range(6):
        rng = np.random.default_rng(site)
        y = rng.integers(0, 20, 400)
        x = (np.eye(20)[y] * 5 + rng.normal(size=(400, 20))).astype(np.float32)
        data[f"site{site}"] = (x, y if alike else (y + 3 * site) % 20)
    settings = {"train.local_epochs": 5, "train.lr": 0.1, "method.sigma": 50.0}
    result = run("fedmcsa", data=data, settings=settings)
    common = {"common", "finished-common"} if alike else {"common"}
    for device in result.devices:
        assert set(result.model(device).members) == {"personalized", "finished-personalized"} | common


def test_a_finished_model_counts_as_one_sample_whatever_others_found() -> None:
    """Others' shares 0.6 and 0.15 of the unfinished models are 0.8 and 0.2 of two samples; without them all count one."""
    models: list[Choice] = ["personalized", "common", "finished-personalized", "finished-common"]
    assert pseudo_counts(models, {"personalized": 0.6, "common": 0.15, "local": 0.25}) == pytest.approx([1.6, 0.4, 1, 1])
    assert pseudo_counts(models, {"personalized": 0.6}) == pseudo_counts(models, {}) == [1, 1, 1, 1]
    assert pseudo_counts(["common", "finished-common"], {"common": 0.3}) == [1, 1]


def test_devices_that_hold_nothing_out_finish_nothing() -> None:
    few = {name: (x[:16], y[:16]) for name, (x, y) in CLOUDS.items()}
    for settings, data in (({"train.validation": 0.0}, CLOUDS), ({}, few)):
        result = run("fedavg", data=data, settings=settings)
        assert all("finished" not in row.keeps for row in result.table())


def test_a_model_that_diverges_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(*arguments: Any) -> Any:
        raise TrainingDiverged("the loss is not finite")
        yield

    monkeypatch.setattr(Baselines, "finished", diverges)
    result = run("fedavg")
    assert result.status["state"] == "done" and all("finished" not in row.keeps for row in result.table())


def test_finishing_helps_where_devices_differ(finished: attune.SimulationResult) -> None:
    assert finished.table().mean("kept") > run("fedavg", "off").table().mean("kept") + 0.1


def test_a_finished_model_predicts_after_it_was_saved(finished: attune.SimulationResult, tmp_path: Any) -> None:
    finished.save(tmp_path)
    x, _ = cloud(9)
    loaded = Model.load(tmp_path / "models" / "site2")
    assert set(loaded.members) == {"common", "finished-common"}
    assert loaded.predict(x) == finished.model("site2").predict(x)


def recorded_orders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return a list that gets (round, epochs, stops) of each evaluation order."""
    asked: list[tuple[int, int, tuple[int, ...]]] = []
    before = Evaluation.compared

    def compared(self: Evaluation, result: Any, held: Any, order: Any, *rest: Any) -> Any:
        asked.append((order.round, order.finish_epochs, tuple(order.finish_stops)))
        return before(self, result, held, order, *rest)

    monkeypatch.setattr(Evaluation, "compared", compared)
    return asked


FLEET = {"train.finish_stop": "fleet", "round.evaluate_every": 0, "round.evaluate_each_last": 0}


def test_the_fleet_tries_several_numbers_of_epochs_and_takes_the_likeliest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The likelihoods after each stop are summed over devices; ties and lower sums lose to fewer epochs."""
    asked = recorded_orders(monkeypatch)
    result = run("fedavg", settings=FLEET)
    stops = FINISH_STOPS[1:]
    assert (ROUNDS - 1, FINISH_EPOCHS, stops[:-1]) in asked
    rows = [row for row in result._outcome.snapshot.rows if (row.work, row.round) == ("evaluate", ROUNDS - 1)]
    sums = {stop: sum(getattr(row, f"likelihood_after_{stop}") for row in rows) for stop in FINISH_STOPS}
    assert len(rows) == len(CLOUDS) and len(set(sums.values())) == len(sums)
    best = max(sums, key=lambda stop: sums[stop])
    until = tuple(stop for stop in stops if stop < best)
    epochs = LONGEST if best == FINISH_EPOCHS else best
    assert {(last, on_way) for round_, last, on_way in asked if round_ == ROUNDS} == {(epochs, until)}


def test_a_rate_of_finishing_without_finishing_is_refused() -> None:
    with pytest.raises(SettingError, match=r"finish_lr need train\.finish"):
        run("fedavg", "off", settings={"train.finish_lr": 0.2})


def test_where_labels_say_nothing_the_fleet_does_not_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = {name: (x, np.random.default_rng(n).permutation(y)) for n, (name, (x, y)) in enumerate(CLOUDS.items())}
    asked = recorded_orders(monkeypatch)
    result = run("fedavg", data=noise, settings=FLEET | OVERFITS)
    assert {epochs for round_, epochs, _ in asked if round_ == ROUNDS} == {0}
    assert all("finished" not in row.keeps for row in result.table())


@pytest.mark.parametrize(("settings", "fleet"), [({}, True), ({"train.finish_stop": "off"}, False)])
def test_in_regression_the_fleet_chooses_unless_the_user_says_no(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], fleet: bool
) -> None:
    """A device cannot see by its own few held-out numbers that a finished model is overfitted."""
    asked = recorded_orders(monkeypatch)
    result = run("fedavg", data=NUMBERS, task="regression", settings=OVERFITS | settings)
    tried = (ROUNDS - 1, FINISH_EPOCHS, FINISH_STOPS[1:-1])
    assert (tried in asked) is fleet
    expected = LONGEST
    if fleet:
        rows = [row for row in result._outcome.snapshot.rows if (row.work, row.round) == ("evaluate", ROUNDS - 1)]
        sums = {stop: sum(getattr(row, f"likelihood_after_{stop}") for row in rows) for stop in FINISH_STOPS}
        expected = max(sums, key=lambda stop: sums[stop])
        assert expected < FINISH_EPOCHS
    assert {epochs for round_, epochs, _ in asked if round_ == ROUNDS} == {expected}


@pytest.mark.parametrize("unit", ["example", "client"])
def test_with_privacy_the_fleet_chooses_nothing_unasked(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    """Likelihoods have no noise, so devices try no numbers of epochs in regression either."""
    asked = recorded_orders(monkeypatch)
    bounds = {"privacy.ranges": [[-9.0, 9.0]], "privacy.target_ranges": [[-9.0, 9.0]]}
    noise: dict[str, Any] = {"privacy.unit": unit, "privacy.noise": 1.0, "privacy.insecure_seed": 1} | bounds
    run("fedavg", data=NUMBERS, task="regression", settings=noise | ({"privacy.devices": 3} if unit == "client" else {}))
    assert asked and not any(stops for *_, stops in asked)


def test_without_likelihoods_devices_finish_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owners withhold scores, or there is no round before the last one."""
    asked = recorded_orders(monkeypatch)
    monkeypatch.setattr(Gate, "tells_scores", False)
    run("fedavg", settings=FLEET)
    assert {epochs for round_, epochs, _ in asked if round_ == ROUNDS} == {LONGEST}
    asked.clear()
    attune.simulate(CLOUDS, "fedavg", rounds=1, settings=SETTINGS | FLEET | {"train.finish": "auto"}, progress=False)
    assert [(epochs, stops) for _, epochs, stops in asked] == [(LONGEST, ())] * len(CLOUDS)


def test_the_fleet_stops_only_what_is_finished() -> None:
    with pytest.raises(SettingError, match=r"train\.finish_stop"):
        run("fedavg", "off", settings=FLEET)


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(SettingError, match=r"train\.finish"):
        run("fedavg", "always")


@pytest.mark.parametrize("method", ["fedavg", "fedper", "mr-mtl", "ditto"])
def test_no_finished_model_starts_another_order(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finish after round 1 too: round 2 has the bits of a run that finishes nothing, what stays on devices included."""
    asked = recorded_orders(monkeypatch)
    model = {"model.name": "dnn", "model.hidden": [8]}
    plain = run(method, "off", settings=model)
    finished = run(method, settings=model | {"train.score_after": [1, ROUNDS]})
    assert (1, 5, ()) in asked and finished.digests == plain.digests
    own = "common" if method == "fedavg" else "personalized"
    for device in plain.devices:
        before = plain.model(device).members.get(own, plain.model(device)).tensors
        after = finished.model(device).members[own].tensors
        assert all(after[name].equal(tensor) for name, tensor in before.items())
