"""A device that takes no part tells the server why; otherwise the operator would only see it come and go."""

from __future__ import annotations

from tests.e2e.harness import tabular_shard

MODEL = "attune.tests.e2e.own_model:tiny"


def test_a_missing_allow_model_is_said_on_the_server(federation_at):
    federation = federation_at("declined")
    anna, ben = (tabular_shard(federation.folder / name, seed=seed, samples=30) for seed, name in enumerate(("anna", "ben")))
    server = federation.server("--method", "fedavg", "--model", MODEL, "--rounds", "1", "--min-clients", "2")
    allowed = federation.device(anna, "--allow-model", MODEL)
    refusing = federation.device(ben)
    assert refusing.code() == 2
    assert f"start with --allow-model {MODEL}" in refusing.text
    server.wait_for(f" device=ben ben takes no part: .* start with --allow-model {MODEL}$")
    ben_now = federation.await_status(lambda found: found["clients"][1]["state"] == "disconnected")["clients"][1]
    assert f"start with --allow-model {MODEL}" in ben_now["note"]
    # It is started again as it was advised, takes part, and the note disappears.
    again = federation.device(ben, "--allow-model", MODEL)
    assert (allowed.code(), again.code()) == (0, 0)
    assert federation.client("ben")["note"] is None


def test_a_device_that_was_begun_under_another_plan_says_so(federation_at):
    federation = federation_at("other-plan")
    shards = [tabular_shard(federation.folder / name, seed=seed, samples=30) for seed, name in enumerate(("anna", "ben"))]
    server = federation.server("--method", "fedavg", "--model", "mlr", "--rounds", "1")
    assert [device.code() for device in federation.devices(shards)] == [0, 0]
    [plan] = federation.folder.glob("attune/devices/*/anna-*/plan.json")
    plan.write_bytes(plan.read_bytes().replace(b'"seed":0', b'"seed":1'))
    assert federation.device(shards[0]).code() == 4
    server.wait_for(" device=anna anna takes no part: the server's plan differs from the one this device trained under")
