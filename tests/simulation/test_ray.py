"""Executor "ray" in a cluster of two workers on this machine: `make ray`. Skipped if Ray is not installed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import attune
from attune.common.errors import FederationFailed, SettingError
from attune.features.cluster import work
from tests.simulation.test_processes import check_bits, diverges, kills
from tests.simulation.test_simulate import CLOUDS, QUICK


def test_without_ray_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(SettingError, match=r"pip install 'attune-fl\[ray\]'"):
        attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, executor="ray")


def test_a_cluster_that_nobody_named_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that Ray does not use the address of the last cluster of this machine, which it remembers."""
    ray = pytest.importorskip("ray")
    asked = []
    monkeypatch.setattr(work, "RemoteExecutor", lambda *_: None)  # workers of a real one need a cluster
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda address=None, **_: asked.append(address))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    work.ray_workers()
    monkeypatch.setenv("RAY_ADDRESS", "ray://named:10001")
    work.ray_workers()
    assert asked == ["local", "ray://named:10001"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default is 15, with which a worker never begins on a busy machine
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, ignore_reinit_error=True)
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("case", ["fedper, sampled", "fedtp+mcsa", "analytic"])
def test_ray_has_the_bits_of_one_after_the_other(
    case: str, cluster: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    check_bits(case, request, tmp_path, "ray")


def test_shards_are_placed_once_and_a_worker_that_died_is_replaced(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from attune.features.cluster import ray_host
    from attune.fedclient.work.processes.requests import CarryOut, PlaceDevice

    orders = 0
    placed: list[tuple[str, int, int]] = []
    killed: list[int] = []

    class Watched(ray_host.RayHost):
        """Pool whose worker dies during the fourth and the seventh order."""

        dying = False

        def ask(self, life: int, request: Any, *more: Any) -> Any:
            nonlocal orders
            if isinstance(request, PlaceDevice):
                placed.append((request.name, id(self), life))
            elif isinstance(request, CarryOut):
                orders += 1
                self.dying = orders in (4, 7)
            return super().ask(life, request, *more)

        def _exchange(self, *arguments: Any) -> Any:
            if self.dying:
                self.dying = False
                killed.append(cluster.get(self.worker.__ray_call__.remote(lambda held: os.getpid())))
                os.kill(killed[-1], signal.SIGKILL)
            return super()._exchange(*arguments)

    monkeypatch.setattr(ray_host, "RayHost", Watched)
    settings = QUICK | {"round.clients": 2, "round.evaluate_every": 1}
    found = attune.simulate(CLOUDS, "fedper", "dnn", 3, settings=settings, executor="ray", workers=2)
    assert len(set(killed)) == 2
    one = attune.simulate(CLOUDS, "fedper", "dnn", 3, settings=settings)
    assert found.digests == one.digests
    assert len(placed) == len(set(placed)), "a shard travels to a worker once in the worker's life"
    assert {name for name, *_ in placed} == set(CLOUDS) and len(placed) > len(CLOUDS)


def test_a_dying_worker_or_a_failing_device_ends_the_simulation_and_is_named(cluster: Any) -> None:
    with pytest.raises(FederationFailed, match=r"3 times in a row while it worked for site0"):
        attune.simulate({"site0": CLOUDS["site0"]}, "fedavg", kills, 1, executor="ray", workers=1)
    settings = {"train.lr": 1e38, "train.clip_norm": 0.0}
    with pytest.raises(FederationFailed, match=r"site\d: .*train.lr"):
        attune.simulate(CLOUDS, "fedavg", diverges, 3, settings=settings, executor="ray", workers=2)
    until = time.monotonic() + 20
    while (free := cluster.available_resources().get("CPU")) != 2 and time.monotonic() < until:
        time.sleep(0.2)
    assert free == 2, "the other worker died with the simulation, and no new one took its place"


def test_an_interruption_reaches_the_workers(cluster: Any) -> None:
    heard: list[float] = []

    def interrupt(share: float) -> None:
        heard.append(share)
        if len(heard) == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        attune.simulate(CLOUDS, "fedavg", rounds=50, settings=QUICK, executor="ray", workers=2, progress=interrupt)
    assert len(heard) in (4, 5), "both workers may have been done at once"
