"""One side is stopped (SIGSTOP) behind an idle open connection: the other side notices."""

import re
import signal
from pathlib import Path
from typing import Any

from attune.common.errors import Unreachable
from tests.connect_proxy import connect_proxy
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


# --- a federation whose devices reach the server through an HTTP proxy alone: enrolment, doctor, streams and blobs

# With inline_bytes = 0 every blob is a transfer of its own.
SETTINGS = ("method.name=fedavg", "model.name=mlr", "round.rounds=2", "train.local_epochs=1", "server.inline_bytes=0")


def test_devices_behind_a_proxy_take_part(federation_at: Any, tmp_path: Path) -> None:
    """The name of the server can be looked up by the proxy alone, so nothing goes another way."""
    kiel, lund = (tabular_shard(tmp_path / name, seed=seed) for seed, name in enumerate(("kiel", "lund")))
    secret = tmp_path / "credentials"
    secret.write_text("ana:p@ss:word\n")
    federation = federation_at("federation")
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    server = federation.server("--exit-when-done", "--min-clients", "2", *words)
    with connect_proxy(tmp_path, "--credentials", "ana:p@ss:word") as proxy:
        where = ("--server", f"federation.invalid:{server.port}", "--proxy-credentials", str(secret))
        through, home = (*where, "--proxy", proxy.address), ("--home", str(tmp_path / "home"))
        token = ("--token", server.join_token)
        refused = federation.command(
            "fedclient", "join", *token, *where[:2], "--proxy", proxy.address, "--connect-timeout", "0", code=None
        )
        assert refused.returncode == Unreachable.exit_code and "wants credentials (407" in refused.stderr, refused.stderr
        federation.command("fedclient", "join", *token, *through, *home, "--name", "kiel")
        checked = federation.command("fedclient", "doctor", "--data", str(kiel), *through, *home)
        assert f"lets kiel in, through the proxy {proxy.address}" in checked.stdout
        federation.environment |= {"https_proxy": f"http://{proxy.address}"}
        devices = [
            federation.device(kiel, *through, *home),
            federation.device(lund, *where, "--proxy", "env", *token, "--home", str(tmp_path / "other")),
        ]
        codes = [process.code() for process in (*devices, server)]
        assert not any(codes), "\n".join(process.text for process in (*devices, server))
        asked = set(proxy.asked)
    assert asked == {f"federation.invalid:{server.port} 200", f"federation.invalid:{server.port} 407"}
    assert {row["client"] for row in federation.metrics()} == {"kiel", "lund"}
    assert all(int(row["bytes_up"]) > 0 for row in federation.metrics() if row["work"] == "train")
    for path in (*tmp_path.rglob("*.json*"), *federation.folder.rglob("*.log")):
        assert "p@ss" not in path.read_text(errors="replace") and "p%40ss" not in path.read_text(errors="replace"), path
