"""Executors of a cohort's orders, stacked and others: the same results, a choice that is kept, a budget of memory."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

import attune
from attune.common.errors import FederationFailed, HomeMismatch, SettingError
from attune.common.wire.files import read_tensors
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.executor import SequentialExecutor, StackedExecutor, Work, done
from tests.e2e.hosted import host
from tests.simulation.test_simulate import CLOUDS, QUICK

SMOOTH = QUICK | {"train.lr": 0.03, "round.evaluate_every": 1}


@pytest.mark.parametrize("method", ["fedavg", "fedmcsa", "fedmcsa, dialled", "pfedme", "per-fedavg"])
def test_side_by_side_comes_to_the_same(method: str) -> None:
    name, dialled, _ = method.partition(", dialled")
    settings = SMOOTH | ({"method.dial": True, "train.validation": 0.3} if dialled else {})
    one_by_one, stacked = (
        attune.simulate(CLOUDS, name, rounds=3, settings=settings, baseline="local", executor=executor)
        for executor in ("sequential", "stacked")
    )
    assert all((client["dial_own"] is not None) == bool(dialled) for client in stacked.status["clients"])
    assert (one_by_one.executor, stacked.executor, stacked.one_by_one) == ("sequential", "stacked", [])
    assert [row.personalized for row in stacked.table()] == pytest.approx([row.personalized for row in one_by_one.table()])
    for name in CLOUDS:
        x = CLOUDS[name][0]
        assert stacked.model(name).predict(x) == one_by_one.model(name).predict(x)


def test_the_same_seeds_give_the_same_bits_again() -> None:
    one, two = (attune.simulate(CLOUDS, "fedmcsa", rounds=2, settings=QUICK, executor="stacked") for _ in range(2))
    assert one.digests == two.digests


def test_a_hosted_fleet_computes_the_devices_that_have_an_order_side_by_side(
    clouds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[int] = []
    run = StackedExecutor.run

    def spied(self: StackedExecutor, works: Sequence[Work]) -> Sequence[Future[OrderResult]]:
        met.append(len(works))
        return run(self, works)

    monkeypatch.setattr(StackedExecutor, "run", spied)
    settings = {"method": {"name": "fedmcsa"}, "model": {"name": "mlr"}, "round": {"rounds": 2}, "train": {"local_epochs": 1}}
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    hosted = host(tmp_path, clouds, settings, executor="stacked")
    expected = attune.simulate(clouds, settings=settings)
    assert sum(met) == 4 * len(clouds) and max(met) > 1, "two rounds, and an evaluation after each"
    for name in clouds:
        found = read_tensors(hosted.model(name) / "model.safetensors")
        [*members] = expected.model(name).members.values()
        assert any(_close(found, member.tensors) for member in members)


def _close(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5) for name in one)


class Backwards(SequentialExecutor):
    """Executor that runs the last order first."""

    def __init__(self) -> None:
        self.cohorts: list[list[str]] = []

    def run(self, works: Sequence[Work]) -> Sequence[Future[OrderResult]]:
        self.cohorts.append([work.order.id for work in works])
        return super().run(works[::-1])[::-1]


class Failing(Backwards):
    def run(self, works: Sequence[Work]) -> Sequence[Future[OrderResult]]:
        return [*super().run(works[:-1]), done(RuntimeError("out of order"))]


def test_an_executor_is_given_whole_cohorts() -> None:
    backwards = Backwards()
    settings = QUICK | {"round.evaluate_every": 1, "round.clients": 2}
    found = attune.simulate(CLOUDS, "fedavg", rounds=2, settings=settings, executor=backwards)
    assert found.digests == attune.simulate(CLOUDS, "fedavg", rounds=2, settings=settings).digests
    steps = [sorted(cohort) for cohort in backwards.cohorts]
    assert [len(step) for step in steps] == [2, 3, 2, 3]
    assert steps[1] == [f"evaluate-1-{name}" for name in CLOUDS]


def test_what_fails_in_an_executor_is_the_failure_of_its_device() -> None:
    with pytest.raises(FederationFailed, match="site2: out of order"):
        attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, executor=Failing())


@pytest.mark.parametrize("until", range(1, 9))
def test_a_cohort_of_which_some_have_answered_already_is_gone_on_with(until: int, tmp_path: Path) -> None:
    orders = 0

    def count(share: float) -> None:
        nonlocal orders
        orders += 1
        if orders == until:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        attune.simulate(CLOUDS, "fedavg", rounds=2, settings=QUICK, home=tmp_path, progress=count, executor=Backwards())
    found = attune.simulate(CLOUDS, "fedavg", rounds=2, settings=QUICK, home=tmp_path, executor=Backwards())
    assert found.digests == attune.simulate(CLOUDS, "fedavg", rounds=2, settings=QUICK).digests


def test_a_home_keeps_the_executor_that_it_was_begun_with(tmp_path: Path) -> None:
    attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path)
    with pytest.raises(HomeMismatch, match="was begun with the executor 'sequential', not 'Backwards'"):
        attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path, executor=Backwards())


def test_an_executor_of_ones_own_must_be_handed_over_again(tmp_path: Path) -> None:
    attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path, executor=Backwards())
    with pytest.raises(SettingError, match="Backwards"):
        attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path)


def test_a_home_whose_executor_a_trial_chose_is_gone_on_with(tmp_path: Path) -> None:
    """Take the record of an earlier version, whose `executor="auto"` wrote why it chose."""
    whole = attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path / "whole", executor="stacked")
    record = b'{"executor":"stacked","why":"stacked: 5 s one by one, 1 s stacked"}'
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "simulation.json").write_bytes(record)
    again = attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path / "begun")
    assert again.executor == "stacked" and again.digests == whole.digests
    assert (tmp_path / "begun" / "simulation.json").read_bytes() == record


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(SettingError, match="did you mean 'sequential'"):
        attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, executor="sequentail")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["fedmcsa", "fedper"])
def test_devices_that_are_put_to_sleep_learn_the_same_bits(method: str) -> None:
    settings = {"train.local_epochs": 1, "round.clients": 2}
    awake, asleep = (
        attune.simulate(CLOUDS, method, "dnn", rounds=3, settings=settings, baseline="local", awake_bytes=limit)
        for limit in (1 << 30, 0)
    )
    assert awake.digests == asleep.digests
    assert list(awake.table()) == list(asleep.table())
