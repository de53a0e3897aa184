"""`fedserver --method auto`: candidates are runs over one fleet, and the choice is that of a simulation, through kill -9."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import attune
from attune.common import faults
from attune.common.config import load_settings
from attune.common.errors import HomeMismatch, SettingError
from attune.fedclient.model.artifact import read_info
from tests.e2e.harness import Federation, FederationAt, Process, tabular_shard

ROUNDS, DEVICES = 3, 3
SETTINGS = (
    "auto.candidates=['fedavg','fedper']", f"round.rounds={ROUNDS}", "train.local_epochs=1", "model.name=dnn", "seed=3"
)  # fmt: skip
FLAGS = [word for setting in (*SETTINGS, "server.threads=1") for word in ("--set", setting)]
TOLD = ("--disclose", "statistics")  # as all devices of a simulation do
KILLS = (
    "server:1:leg-over=kill", "server:1:race-written=kill", "server:1:run-put-aside=kill", "server:1:run-switched=kill",
    "server:1:blobs-taken-back=kill", "server:1:run-taken-back=kill", "server:3:leg-over=kill"
)  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    return [tabular_shard(folder / f"site{n}", seed=n, samples=40) for n in range(DEVICES)]


@pytest.fixture(scope="module")
def simulated(shards: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the scores of a simulation, and the files of each device's model."""
    settings = load_settings(None, SETTINGS, {})
    result = attune.simulate({shard.name: shard for shard in shards}, "auto", settings=settings, progress=False)
    saved = result.save(tmp_path_factory.mktemp("saved") / "out") / "models"
    assert result.auto is not None
    report: dict[str, Any] = json.loads(json.dumps(result.auto.report()))
    return report, {shard.name: read_info(saved / shard.name).files for shard in shards}


def check(federation: Federation, shards: list[Path], simulated: tuple[dict[str, Any], dict[str, Any]]) -> None:
    report, models = simulated
    status = json.loads(json.dumps(federation.status()))
    assert {name: status["auto"][name] for name in report} == report and status["auto"]["trains"] is None
    assert (status["state"], status["method"], status["run"]) == ("done", report["chosen"], report["chosen"])
    assert {shard.name: read_info(federation.model(shard)).files for shard in shards} == models
    shown = federation.command("fedserver", "status").stdout
    assert "auto chooses" in shown or "no evidence that federating pays here" in shown
    runs = json.loads(federation.command("fedserver", "run", "list", "--json").stdout)
    assert sorted(run["name"] for run in runs) == ["fedavg", "fedper", "local"]
    assert "is whole" in federation.command("fedserver", "verify").stdout


def test_a_race_over_the_network_has_the_scores_and_the_models_of_a_simulation(
    federation_at: FederationAt, shards: list[Path], simulated: Any
) -> None:
    federation = federation_at("race")
    server = federation.server("--method", "auto", "--min-clients", str(DEVICES), "--exit-when-done", *FLAGS)
    devices = federation.devices(shards, *TOLD)
    codes = [process.code() for process in (*devices, server)]
    assert not any(codes), "\n".join(process.text for process in (*devices, server))
    check(federation, shards, simulated)
    assert server.text.count("auto: local trains to round") == 3


def test_a_server_that_is_killed_at_every_step_of_a_race_chooses_the_same(
    federation_at: FederationAt, shards: list[Path], simulated: Any
) -> None:
    federation = federation_at("killed")
    first, *others = KILLS
    server: Process = federation.server("--method", "auto", "--min-clients", str(DEVICES), *FLAGS, fault=first)
    devices = federation.devices(shards, *TOLD)
    assert server.code() == -signal.SIGKILL, f"{first}: {server.text}"
    for fault in others:  # some strike before the server listens
        words = ("--host", "127.0.0.1", "--port", str(federation.port), "--dashboard", "off")
        environment = federation.environment | {faults.VARIABLE: fault}
        log = federation.folder / f"{fault.replace(':', '-')}.log"
        server = Process([str(Path(sys.executable).with_name("fedserver")), *words], log, environment)
        federation.processes.append(server)
        assert server.code() == -signal.SIGKILL, f"{fault}: {server.text}"
    server = federation.server("--exit-when-done")
    codes = [process.code() for process in (*devices, server)]
    assert not any(codes), "\n".join(process.text for process in (*devices, server))
    check(federation, shards, simulated)


def test_settings_that_allow_no_race_and_other_settings_are_refused(federation_at: FederationAt, shards: list[Path]) -> None:
    federation = federation_at("refused")
    for words, reason in (
        (("--rounds", "2"), "needs 3 rounds at least"),
        (("--set", "auto.candidates=['fedavgg']"), "unknown method 'fedavgg'"),
        (("--set", "privacy.unit=example", "--set", "privacy.epsilon=3"), "every candidate would spend a budget"),
    ):
        done = federation.command("fedserver", "--port", "0", "--method", "auto", *words, code=SettingError.exit_code)
        assert reason in done.stderr and not federation.home.exists()
    server = federation.server("--method", "auto", "--min-clients", str(DEVICES), *FLAGS)
    assert server.stop() == 0
    assert "auto waits for devices" in federation.command("fedserver", "status").stdout
    done = federation.command("fedserver", "--method", "fedavg", code=HomeMismatch.exit_code)
    assert "--method auto" in done.stderr
    done = federation.command("fedserver", "run", "new", "second", code=HomeMismatch.exit_code)
    assert "fedserver run stop" in done.stderr
