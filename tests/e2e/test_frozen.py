"""One side is stopped (SIGSTOP) behind an idle open connection: the other side notices."""

from __future__ import annotations

import re
import signal

from tests.e2e.harness import tabular_shard, until

NOTICED_S = 5.0
ROOM_S = 3.0  # allowance for a busy machine


def count(process, pattern):
    return len(re.findall(pattern, process.text, re.MULTILINE))


def test_a_frozen_side_is_noticed_and_taken_up_again(federation_at, tmp_path):
    federation = federation_at("frozen")
    server = federation.server("--min-clients", "2")
    device = federation.device(tabular_shard(tmp_path / "one", 1))
    device.wait_for("waiting for 1 more device")

    device.signal(signal.SIGSTOP)
    until(lambda: count(server, " one disconnected"), "the server notices a frozen device", NOTICED_S + ROOM_S)
    device.signal(signal.SIGCONT)
    until(lambda: count(server, " one connected") == 2, "the device comes back")
    device.wait_for("^connected again")

    server.signal(signal.SIGSTOP)
    until(lambda: count(device, "the server has stopped answering"), "the device notices a frozen server", NOTICED_S + ROOM_S)
    server.signal(signal.SIGCONT)
    until(lambda: count(server, " one connected") == 3, "the device comes back")
    until(lambda: count(device, "^connected again") == 2, "the device says so")
    assert device.stop() in (0, 130, 143, -signal.SIGTERM)
    assert server.stop() == 0
    for process in (server, device):
        assert not re.search("Traceback|Task was destroyed|never retrieved|aclose", process.text), process.text


# --- a device that takes no part tells the server why; otherwise the operator would only see it come and go

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
