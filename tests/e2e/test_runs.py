"""Several runs over one enrolled fleet, in real processes: devices enrol once, and every run keeps its own results."""

import json
from pathlib import Path

from attune.common.errors import HomeBusy
from attune.fedserver.home import ServerHome
from tests.e2e.harness import Federation, FederationAt, tabular_shard, until

FIRST = ("--method", "fedavg", "--model", "mlr", "--min-clients", "2", "--rounds", "2", "--set", "train.local_epochs=1")
SECOND = ("--method", "fedper", "--model", "dnn", "--min-clients", "2", "--rounds", "1")


def done(federation: Federation, devices: int) -> None:
    federation.await_status(
        lambda status: (
            status["state"] == "done"
            and sum(client["accuracy"] is not None for client in status["clients"]) == devices
            and not status["awaited"]
        )
    )


def test_a_fleet_takes_part_in_the_next_run_without_enrolling_again(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("runs")
    shards = [tabular_shard(tmp_path / name, seed) for seed, name in enumerate(("stays", "comes-back"))]
    server = federation.server(*FIRST)
    stays = federation.device(shards[0], "--stay")
    comes_back = federation.device(shards[1])
    assert comes_back.code() == 0, comes_back.text
    stays.wait_for("^waiting for the next run of this federation$")
    done(federation, 2)
    federation.command("fedserver", "run", "new", "second", *SECOND, code=HomeBusy.exit_code)
    assert server.stop() == 0
    first = {path.name: path.read_bytes() for path in federation.model(shards[0]).iterdir()}
    certificates = {each.fingerprint for each in ServerHome(federation.home).snapshot().certificates}

    begun = federation.command("fedserver", "run", "new", "second", *SECOND).stdout
    assert str(federation.home / "runs" / "first") in begun
    federation.server()
    federation.device(shards[1], "--token", "no token is looked at")
    stays.wait_for("^the run second of this federation begins, with fedper")
    done(federation, 2)
    until(lambda: stays.text.count("waiting for the next run") == 2, "the second model to be kept")

    status = federation.status()
    assert (status["run"], status["method"], status["round"]) == ("second", "fedper", 1)
    assert {each.fingerprint for each in ServerHome(federation.home).snapshot().certificates} == certificates
    home = federation.model(shards[0]).parent
    kept = home / "runs" / "first" / "model"
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == first
    assert json.loads((home / "plan.json").read_bytes())["run"] == "second"
    federation.command("fedclient", "evaluate", "--data", str(shards[0]), "--home", str(home))

    listed = json.loads(federation.command("fedserver", "run", "list", "--json").stdout)
    assert [(run["name"], run["present"], run["method"], run["round"], run["devices"]) for run in listed] == [
        ("first", False, "fedavg", 2, 2),
        ("second", True, "fedper", 1, 2),
    ]
    compared = json.loads(federation.command("fedserver", "compare", "first", str(federation.home), "--json").stdout)
    assert [(run["method"], run["devices"]) for run in compared] == [("fedavg", 2), ("fedper", 2)]
    assert compared[1]["against_first"]["devices"] == 2
    shown = federation.command("fedserver", "status", "--home", str(federation.home / "runs" / "first")).stdout
    assert "round 2/2 of fedavg" in shown
    assert "is whole" in federation.command("fedserver", "verify").stdout
    events = [json.loads(line)["event"] for line in federation.command("fedserver", "audit", "--json").stdout.splitlines()]
    assert events.count("enrolled") == 2 and events.count("run begun") == 1
