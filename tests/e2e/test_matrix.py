"""`fedserver evaluate --matrix` in real processes over mutual TLS: two sites share their network, one does not; kill -9."""

from pathlib import Path

import msgspec
import pytest

from attune.common.wire.files import read_tensors, write_tensors
from attune.fedserver.home import ServerHome
from tests.e2e.harness import FederationAt, run_to_the_end, tabular_shard

TRAINED = ("--method", "fedper", "--model", "mlr", "--rounds", "1")
SETTINGS = ("--set", "train.local_epochs=1", "--set", "round.analytic=off")
MATRIX = ["evaluate", "--matrix"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    return [tabular_shard(folder / name, seed) for seed, name in enumerate(("kiel", "lund", "oslo"))]


def test_shared_networks_are_scored_at_all_sites_through_kill_9(federation_at: FederationAt, shards: list[Path]) -> None:
    federation = federation_at("matrix")
    run_to_the_end(federation, shards, *TRAINED, *SETTINGS)
    before = {shard.name: (federation.model(shard) / "model.safetensors").read_bytes() for shard in shards}
    server = federation.server(words=MATRIX, fault="server:1:settled=hang")  # the networks are there, no site scores yet
    sharing = federation.devices(shards[:2], "--share-model")
    keeps = federation.device(shards[2])
    server.await_fault()
    server.kill()
    again = federation.server(words=MATRIX)
    for process in (*sharing, keeps, again):
        assert process.code() == 0, process.text
    assert "going on with evaluation-1" in again.text and "network of" in again.text

    status, snapshot = federation.status(), ServerHome(federation.home).snapshot()
    assert (status["state"], status["round"], status["rounds"]) == ("done", 1, 1)
    assert [(row.client, row.work) for row in snapshot.rows if row.work == "train"] == [("kiel", "train"), ("lund", "train")]
    others = {client["name"]: client.get("others", {}) for client in status["clients"]}
    assert {name: sorted(scores) for name, scores in others.items()} == {
        "kiel": ["lund"],
        "lund": ["kiel"],
        "oslo": ["kiel", "lund"],
    }
    assert all(one.keys() == {"score", "better", "worse"} for scores in others.values() for one in scores.values())
    told = "get this device's finished network, whose parameters can reveal samples"
    assert [told in process.text for process in (*sharing, keeps)] == [True, True, False]
    assert "the network of kiel here: accuracy" in keeps.text and "corrected for 2 networks" in keeps.text
    assert {shard.name: (federation.model(shard) / "model.safetensors").read_bytes() for shard in shards} == before
    files = federation.export()
    assert {name for name in files if name.startswith("clients/")} == {f"clients/{shard.name}.safetensors" for shard in shards}
    assert files["clients/kiel.safetensors"] == before["kiel"] and files["clients/oslo.safetensors"] != before["oslo"]
    refused = federation.command("fedserver", "evaluate", code=None).stderr
    assert "the run evaluation-1 has no model of its own" in refused
    out = federation.folder / "report.html"
    federation.command("fedserver", "report", "--out", str(out))
    page = out.read_text("utf-8")
    assert "Every site on every model" in page and "sites&#x27; networks, as they had them" in page and "at oslo" in page
    federation.command("fedserver", "plot", "--out", str(federation.folder / "plots"), "--picture", "matrix")
    assert (federation.folder / "plots" / "matrix.png").read_bytes().startswith(b"\x89PNG")


def test_broken_networks_are_refused_by_name_and_the_others_go_on(federation_at: FederationAt, shards: list[Path]) -> None:
    federation = federation_at("broken")
    run_to_the_end(federation, shards, *TRAINED, *SETTINGS)
    for shard in shards[1:]:
        folder = federation.model(shard)
        tensors = read_tensors(folder / "model.safetensors")
        wrong = {name: tensor * float("nan") if shard.name == "lund" else tensor[:1] for name, tensor in tensors.items()}
        digest = write_tensors(folder / "model.safetensors", wrong).digest
        described = msgspec.json.decode((folder / "model.json").read_bytes())
        described["files"]["model.safetensors"] = digest
        (folder / "model.json").write_bytes(msgspec.json.encode(described))
    server = federation.server("--set", "round.deadline_s=20", words=MATRIX)
    devices = federation.devices(shards, "--share-model")
    assert [process.code() for process in (server, devices[0])] == [0, 0], server.text
    assert "lund's attended update: 'head.bias' has 3 NaN" in federation.client("lund")["note"]
    assert "oslo's attended update: 'head.bias' has shape [1]; [3] was expected" in federation.client("oslo")["note"]
    rows = ServerHome(federation.home).snapshot().rows
    assert {name for row in rows for name in row.others} == {"kiel"}
    assert [row.client for row in rows if row.work == "train"] == ["kiel"]
