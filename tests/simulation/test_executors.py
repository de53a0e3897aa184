"""Executors of a cohort's orders: an executor gets all of them, the choice is kept, and memory has a budget."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

import attune
from attune.common.errors import FederationFailed, HomeMismatch, SettingError
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.executor import SequentialExecutor, Work, done
from tests.simulation.test_simulate import CLOUDS, QUICK


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
