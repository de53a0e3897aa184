"""Devices in several processes: the same bits as one by one, also when such a process dies."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attune
from attune.common.config import merge
from attune.common.errors import FederationFailed, HomeMismatch, SettingError
from attune.common.plan import ModelSpec
from attune.fedclient.model.artifact import read_info
from attune.fedclient.work.processes import pipe, process_host
from attune.fedclient.work.processes.pipe import receive, send
from attune.simulation.result import SimulationResult
from tests.e2e.hosted import host as hosted
from tests.forked import hosts
from tests.simulation.test_same_bits import SAMPLED, SMALL, VIT
from tests.simulation.test_simulate import CLOUDS, QUICK

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedmcsa, sampled": ("clouds", merge(SAMPLED, {"method": {"name": "fedmcsa"}, "round": {"train": "all"}})),
    "fedper, sampled": ("clouds", merge(SAMPLED, {"method": {"name": "fedper"}, "round": {"evaluate_every": 1}})),
    "fedtp+mcsa": ("digits", {"method": {"name": "fedtp+mcsa"}, "model": VIT}),
    "analytic": ("digits", {"method": {"name": "analytic"}}),
    "fedavg, bf16": ("clouds", {"method": {"name": "fedavg"}, "round": {"encoding": "bf16"}}),
}

TESTS = "ATTUNE_TESTS_PROCESS"  # variable with the process of the tests, which child processes inherit
os.environ.setdefault(TESTS, str(os.getpid()))


@pytest.fixture(scope="module", autouse=True)
def forked_hosts() -> Iterator[None]:
    """Fork the processes, so that none imports torch again. That the program itself starts is tested below."""
    with hosts():
        yield


def models(result: SimulationResult, folder: Path, names: Mapping[str, Any]) -> dict[str, Mapping[str, str]]:
    saved = result.save(folder)
    return {name: read_info(saved / "models" / name).files for name in names}


@pytest.mark.parametrize("case", CASES)
def test_processes_have_the_bits_of_one_after_the_other(case: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    check_bits(case, request, tmp_path, "processes", workers=2)


def check_bits(case: str, request: pytest.FixtureRequest, tmp_path: Path, executor: Any, **more: Any) -> None:
    """Check that an executor has the bits of devices one after the other."""
    which, given = CASES[case]
    members, settings = request.getfixturevalue(which), merge(SMALL, given)
    one = attune.simulate(members, settings=settings, baseline="local")
    spread = attune.simulate(members, settings=settings, baseline="local", executor=executor, **more)
    assert spread.executor == executor
    assert spread.digests == one.digests
    assert list(spread.table()) == list(one.table())
    assert models(spread, tmp_path / "spread", members) == models(one, tmp_path / "one", members)


@pytest.mark.parametrize(("home", "deaths"), [(False, (4, 11)), (True, (9,))])
def test_what_a_process_that_died_was_doing_is_done_again(home: bool, deaths: tuple[int, ...], tmp_path, monkeypatch) -> None:
    settings = QUICK | {"round.clients": 2, "round.evaluate_every": 1}
    killed: list[int] = []

    class Dying(process_host.ProcessHost):
        """Process that dies during some calls."""

        asked = 0

        def _exchange(self, *arguments: Any) -> Any:
            Dying.asked += 1
            if Dying.asked in deaths:
                os.kill(self.pid, signal.SIGKILL)
                killed.append(self.pid)
            return super()._exchange(*arguments)

    monkeypatch.setattr(process_host, "process_host", Dying)
    place = tmp_path / "home" if home else None
    settled: dict[str, Any] = {"settings": settings, "baseline": "local"}  # a process of another test may be taken again
    found = attune.simulate(CLOUDS, "fedper", "dnn", 3, executor="processes", workers=2, home=place, **settled)
    assert len(set(killed)) == len(deaths)
    one = attune.simulate(CLOUDS, "fedper", "dnn", 3, **settled)
    assert found.digests == one.digests
    assert models(found, tmp_path / "found", CLOUDS) == models(one, tmp_path / "one", CLOUDS)


def test_learners_that_are_put_away_come_back_with_the_same_bits() -> None:
    settings = QUICK | {"round.clients": 2}
    settled: dict[str, Any] = {"settings": settings, "baseline": "local"}  # a process of another test may be taken again
    one = attune.simulate(CLOUDS, "fedper", "dnn", 3, **settled)
    found = attune.simulate(CLOUDS, "fedper", "dnn", 3, executor="processes", workers=2, awake_bytes=0, **settled)
    assert found.digests == one.digests and list(found.table()) == list(one.table())


def kills(spec: ModelSpec) -> nn.Module:
    """Make a model whose training ends the process, as one that needs too much memory would.

    Before training, the server, which is this process, tries every model on two samples; that works.
    """

    class Killing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and os.environ[TESTS] != str(os.getpid()):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().forward(x)

    return nn.Sequential(nn.Flatten(), Killing(4, spec.classes))


def test_work_that_kills_every_process_ends_the_simulation_with_its_device() -> None:
    with pytest.raises(FederationFailed, match=r"signal 9.*3 times in a row while it worked for site0"):
        attune.simulate({"site0": CLOUDS["site0"]}, "fedavg", kills, 1, executor="processes", workers=1)


def diverges(spec: ModelSpec) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, spec.classes))


def test_an_error_there_is_the_error_of_its_device_here() -> None:
    settings = {"train.lr": 1e38, "train.clip_norm": 0.0}
    with pytest.raises(FederationFailed, match=r"site\d: .*train.lr"):
        attune.simulate(CLOUDS, "fedavg", diverges, 3, settings=settings, executor="processes", workers=2)


def test_a_home_keeps_that_devices_are_spread(tmp_path: Path) -> None:
    first = attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path, executor="processes", workers=1)
    again = attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path)
    assert again.executor == first.executor == "processes" and again.digests == first.digests
    with pytest.raises(HomeMismatch, match="was begun with the executor 'processes', not 'sequential'"):
        attune.simulate(CLOUDS, "fedavg", rounds=1, settings=QUICK, home=tmp_path, executor="sequential")


def test_models_that_only_this_process_knows_are_refused() -> None:
    with pytest.raises(SettingError, match="found by its name"):
        attune.simulate(CLOUDS, "fedavg", nn.Linear(4, 3), 1, executor="processes")


def test_the_program_of_such_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "subprocess", subprocess)
    started = process_host.ProcessHost()
    assert started.emptied() and started.life == 1
    os.kill(started.pid, signal.SIGKILL)


def test_a_fleet_over_the_network_has_the_same_bits_too(clouds: dict[str, Path], tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    settings = merge(SMALL, {"method": {"name": "fedper"}, "round": {"clients": 2}})
    one = attune.simulate(clouds, settings=settings)
    network = hosted(tmp_path, clouds, settings, executor="processes")
    assert network.digests == one.digests
    saved = models(one, tmp_path / "saved", clouds)
    assert saved == {name: read_info(network.model(name)).files for name in clouds}


def test_tensors_arrive_as_they_were_sent() -> None:
    tensors = {
        "half": torch.randn(3, 5).to(torch.bfloat16), "none": torch.empty(0, 2), "one": torch.tensor(3),
        "flags": torch.tensor([True, False]), "turned": torch.arange(6.0).view(2, 3).t(), "large": torch.randn(1 << 19),
    }  # fmt: skip
    for size in (5, 6):  # joined into one write, and written one by one
        given = dict(list(tensors.items())[:size])
        one, other = Pipe()
        writer = threading.Thread(target=send, args=(one, given))
        writer.start()
        found = receive(other)
        writer.join()
        assert list(found) == list(given)
        for name, tensor in given.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
