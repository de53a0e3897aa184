"""`fedserver evaluate`: a given model at all sites without training, in real processes over mutual TLS, through kill -9."""

from pathlib import Path

import pytest

from attune.fedserver.home import ServerHome
from tests.e2e.harness import IN_COMPARISON, FederationAt, run_to_the_end, tabular_shard

TRAINED = (
    "--method",
    "fedavg",
    "--model",
    "mlr",
    "--rounds",
    "2",
    "--set",
    "train.local_epochs=1",
    "--set",
    "round.analytic=off",
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    return [tabular_shard(folder / name, seed) for seed, name in enumerate(("kiel", "lund", "oslo"))]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_common_model_is_evaluated_at_all_sites_through_kill_9(federation_at: FederationAt, shards: list[Path]) -> None:
    federation = federation_at("evaluated")
    run_to_the_end(federation, shards, *TRAINED)
    trained = federation.status()
    models = {shard.name: files(federation.model(shard)) for shard in shards}

    planned = federation.server(words=["evaluate"], fault="server:*:plan-committed=hang")
    quick = [federation.device(shards[0]), federation.device(shards[1], "--metrics", "none")]
    hangs = federation.device(shards[2], fault=IN_COMPARISON)
    planned.await_fault()
    planned.kill()
    server = federation.server(words=["evaluate"])
    hangs.await_fault()
    federation.await_status(lambda status: len(status["awaited"]) == 1)
    server.kill()
    hangs.kill()
    again = federation.server(words=["evaluate"])
    last = federation.device(shards[2])
    for process in (*quick, last, again):
        assert process.code() == 0, process.text
    assert "going on with evaluation-1" in again.text

    status, snapshot = federation.status(), ServerHome(federation.home).snapshot()
    assert (status["run"], status["state"], status["round"], status["rounds"]) == ("evaluation-1", "done", 0, 0)
    assert [(row.client, row.work, row.round) for row in snapshot.rows] == [(s.name, "evaluate", 0) for s in shards]
    before = {client["name"]: client["accuracy_common"] for client in trained["clients"]} | {"lund": None}
    assert {client["name"]: client["accuracy_common"] for client in status["clients"]} == before
    assert {client["name"]: client["kept"] for client in status["clients"]} == {
        "kiel": "common",
        "lund": None,
        "oslo": "common",
    }
    assert {shard.name: files(federation.model(shard)) for shard in shards} == models
    assert "this device keeps the model that it had" in last.text

    out = federation.folder / "report.html"
    federation.command("fedserver", "report", "--out", str(out), "--question", "Keep this model?")
    page = out.read_text("utf-8")
    assert "Keep this model?" in page and "none: a given model" in page and "Nothing was trained" in page
    assert "kiel, lund, oslo: no comparison was reported." in page
    federation.command("fedserver", "report", "--out", str(out), "--run", "first")
    assert "fedavg, 2 of 2 rounds" in out.read_text("utf-8")
