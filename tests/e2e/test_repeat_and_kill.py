"""The same seeds give the same bits: in a simulation, in processes, and through kill -9 of either side at every phase."""

from __future__ import annotations

import csv
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

import attune
from attune.common.config import load_settings
from attune.fedclient.model.artifact import read_info
from attune.fedclient.options import Baseline
from tests.e2e.harness import IN_AGGREGATION, IN_COMPARISON, IN_TRAINING, Federation

OFF = "round.analytic=off"  # these devices disclose no sums, and all devices of a simulation do
FEDTP = (OFF, "round.rounds=3", "train.local_epochs=1")
FEDMCSA = (
    OFF,
    *("method.name=fedmcsa", "model.name=mlr", "round.rounds=3", "round.train=all", "round.clients=2", "train.local_steps=4"),
)
FEDAVG = (OFF, "method.name=fedavg", "model.name=mlr")
TOLD = ("--disclose", "statistics")  # as all devices of a simulation do
BY_THE_CLOCK = ("seconds", "bytes_down")  # metrics that kills change: a killed device downloads again


@dataclass(frozen=True)
class Outcome:
    """Outcome of a federation: exported tensors, the devices' models, and their reports."""

    exported: dict[str, bytes]
    models: dict[str, bytes]
    metrics: list[dict[str, str]]

    @classmethod
    def simulated(cls, folder: Path, shards: list[Path], settings: tuple[str, ...], baseline: Baseline = "none") -> Outcome:
        """Simulate the same federation in this process, save it in `folder`, and return its outcome."""
        members = {shard.name: shard for shard in shards}
        attune.simulate(members, settings=load_settings(None, settings, {}), baseline=baseline).save(folder)
        files = [path for path in folder.rglob("*.safetensors") if not path.is_relative_to(folder / "models")]
        exported = {str(path.relative_to(folder)): path.read_bytes() for path in files}
        models = {shard.name: (folder / "models" / shard.name / "model.safetensors").read_bytes() for shard in shards}
        with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return cls(exported, models, [{key: row[key] for key in row if key not in BY_THE_CLOCK} for row in rows])

    @classmethod
    def of(cls, federation: Federation, shards: list[Path]) -> Outcome:
        metrics = [{key: row[key] for key in row if key not in BY_THE_CLOCK} for row in federation.metrics()]
        exported = {name: data for name, data in federation.export().items() if name.endswith(".safetensors")}
        models = {shard.name: (federation.model(shard) / "model.safetensors").read_bytes() for shard in shards}
        return cls(exported, models, metrics)


def flags(settings: tuple[str, ...]) -> list[str]:
    """Return the flags of these settings, with one thread on the server too: a sum over several threads has other bits."""
    return [word for setting in (*settings, "server.threads=1") for word in ("--set", setting)]


@pytest.fixture(scope="module")
def fedtp(tmp_path_factory: pytest.TempPathFactory, three_shards: list[Path]) -> Outcome:
    return Outcome.simulated(tmp_path_factory.mktemp("fedtp"), three_shards, FEDTP)


@pytest.fixture(scope="module")
def fedmcsa(tmp_path_factory: pytest.TempPathFactory, three_shards: list[Path]) -> Outcome:
    return Outcome.simulated(tmp_path_factory.mktemp("fedmcsa"), three_shards, FEDMCSA)


def test_these_federations_leave_something_of_every_device(fedtp, fedmcsa):
    assert len(fedtp.exported) == 5
    assert len(set(fedtp.models.values())) == 3
    trained = [row for row in fedmcsa.metrics if row["work"] == "train"]
    assert len(trained) == 9  # all three train in every round,
    senders = [{row["client"] for row in trained if row["round"] == n and row["bytes_up"] != "0"} for n in "123"]
    assert [len(names) for names in senders] == [2, 2, 2]  # and two of them exchange weights
    assert len(set(fedmcsa.models.values())) == 3


def test_kill_of_either_side_in_every_phase_loses_nothing(fedtp, federation_at, three_shards):
    federation = federation_at("killed")
    one, two, three = three_shards
    names = [shard.name for shard in three_shards]

    server = federation.server("--min-clients", "3", *flags(FEDTP))
    devices = {shard.name: federation.device(shard, *TOLD) for shard in (one, two)}
    federation.await_status(lambda status: [client["state"] for client in status["clients"]] == ["idle", "idle"])
    assert federation.status()["state"] == "waiting"
    server.kill()
    assert (federation.status()["state"], federation.status()["running"]) == ("waiting", False)

    # Training: two updates have arrived, and the third device is at work. The server and that device are killed.
    server = federation.server()
    devices[three.name] = federation.device(three, *TOLD, fault=IN_TRAINING)
    devices[three.name].await_fault()
    accepted = {f"train-1-{name}" for name in names[:2]}
    status = federation.await_status(lambda status: [entry["name"] for entry in status["awaited"]] == [three.name])
    assert (status["state"], federation.inbox()) == ("training", accepted)
    server.kill()
    devices[three.name].kill()
    assert federation.inbox() == accepted
    status = federation.status()
    assert [entry["name"] for entry in status["awaited"]] == [three.name]

    # Stopped in the ordinary way and started without any flag, the server continues the round that it was in.
    server = federation.server()
    assert server.stop() == 0
    assert federation.inbox() == accepted

    # It is killed while it aggregates, when the new state is written and not yet committed.
    server = federation.server(fault=IN_AGGREGATION)
    devices[three.name] = federation.device(three, *TOLD)
    server.await_fault()
    assert federation.status()["state"] == "aggregating"
    server.kill()
    assert federation.inbox() == accepted | {f"train-1-{three.name}"}
    assert (federation.status()["state"], federation.status()["round"]) == ("aggregating", 0)

    # It runs to the end, and is killed there.
    server = federation.server()
    assert [process.code() for process in devices.values()] == [0, 0, 0], [process.text for process in devices.values()]
    status = federation.status()
    assert (status["state"], status["round"], status["running"]) == ("done", 3, True)
    server.kill()
    stopped = federation.status()
    assert (stopped["state"], stopped["accuracy"]) == ("done", status["accuracy"])
    server = federation.server()
    back = federation.device(one, *TOLD)
    assert back.code() == 0, back.text
    assert Outcome.of(federation, three_shards) == fedtp
    # Accepted updates were not requested again: each round is logged once.
    for process in devices.values():
        rounds = [line.split("  ")[0] for line in process.text.splitlines() if line.startswith("round")]
        assert rounds == ["round 1", "round 2", "round 3"]
    assert "enrolled" not in devices[three.name].text
    assert server.stop() == 0


def test_kill_in_mid_run_where_all_train_gives_the_same_bits(fedmcsa, federation_at, three_shards):
    """Use FedMCSA, which keeps state for devices outside the cohort on both sides: it must not be lost or counted twice."""
    federation = federation_at("killed-mcsa")
    server = federation.server("--min-clients", "3", *flags(FEDMCSA), fault=IN_AGGREGATION)
    devices = [federation.device(shard, *TOLD) for shard in three_shards]
    server.await_fault()
    server.kill()
    devices[0].kill()
    federation.server()
    devices[0] = federation.device(three_shards[0], *TOLD)
    federation.await_status(lambda status: status["round"] >= 1)
    devices[1].signal(signal.SIGTERM)
    if devices[1].code():  # unless it was done already
        devices[1] = federation.device(three_shards[1], *TOLD)
    assert [process.code() for process in devices] == [0, 0, 0], [process.text for process in devices]
    assert Outcome.of(federation, three_shards) == fedmcsa


def test_kill_around_an_early_end_changes_neither_the_last_round_nor_a_bit(federation_at, three_shards, tmp_path):
    """The rate is too large, so that held-out samples do not become likelier from round to round, and fewer than 30 are done.

    The server is killed when the evaluation that ends the federation is committed, and when it has decided and not committed.
    """
    settings = (*FEDAVG, "round.rounds=30", "round.patience=5", "train.lr=4", "train.local_epochs=10")
    simulated = Outcome.simulated(tmp_path / "simulated", three_shards, settings)
    last = max(int(row["round"]) for row in simulated.metrics)
    assert last < 30
    federation = federation_at("early")
    server = federation.server("--min-clients", "3", *flags(settings), fault=f"server:{last - 2}:evaluation-committed=hang")
    devices = [federation.device(shard, *TOLD) for shard in three_shards]
    server.await_fault()
    server.kill()
    server = federation.server(fault=f"server:{last - 1}:aggregated=hang")
    server.await_fault()
    server.kill()
    server = federation.server()
    assert [process.code() for process in devices] == [0, 0, 0], [process.text for process in devices]
    status = federation.status()
    assert (status["state"], status["round"], status["rounds"]) == ("done", last, last)
    assert Outcome.of(federation, three_shards) == simulated
    assert server.stop() == 0


def test_kill_of_a_device_that_has_fitted_ordinary_models_changes_no_model(federation_at, three_shards, tmp_path):
    """Fitted models are in the home before the device answers. It is killed when they are there, and fits none again."""
    settings = (*FEDAVG, "round.rounds=2", "train.local_epochs=1")
    Outcome.simulated(tmp_path, three_shards, settings, "alone")
    federation = federation_at("fitted")
    alone = (*TOLD, "--baseline", "alone")
    federation.server("--min-clients", "3", *flags(settings))
    *others, last = three_shards
    processes = [federation.device(shard, *alone) for shard in others]
    killed = federation.device(last, *alone, fault=IN_COMPARISON)
    killed.await_fault()
    home = federation.folder / "attune" / "devices" / f"localhost_{federation.port}"
    fitted = {path: path.stat().st_mtime_ns for path in home.glob(f"{last.name}-*/fitted/*/*.safetensors")}
    assert fitted
    killed.kill()
    processes.append(federation.device(last, *alone))
    assert [process.code() for process in processes] == [0, 0, 0], [process.text for process in processes]
    assert {path: path.stat().st_mtime_ns for path in fitted} == fitted
    for shard in three_shards:
        files = read_info(federation.model(shard)).files
        assert files == read_info(tmp_path / "models" / shard.name).files
        assert {"forest.safetensors", "logistic.safetensors"} & files.keys()
