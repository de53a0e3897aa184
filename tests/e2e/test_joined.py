"""A device between `join` and its first start, and the lines with which a server ends: what an operator reads about them."""

import os
import signal
import time

from attune.fedserver.rpc.connection_limiter import LOOK_S
from tests.e2e.hand import Hand, refusal
from tests.e2e.harness import FederationAt, tabular_shard

FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", "1", "--rounds", "1")


def test_doctor_before_and_after_join_leaves_no_refusal_and_then_knows_the_device(federation_at: FederationAt) -> None:
    federation = federation_at("joined")
    server = federation.server(*FLAGS)
    address = f"localhost:{server.port}"
    shard = str(tabular_shard(federation.folder / "ada", seed=1))
    said = federation.command("fedclient", "doctor", "--server", address, "--data", shard).stdout
    assert f"ok    server: a process listens at {address}" in said
    time.sleep(2 * LOOK_S + 1)
    assert "refused" not in server.text, "before it has joined"
    federation.command("fedclient", "join", "--server", address, "--token", server.join_token, "--name", "ada")
    for words in (("--server", address), ("--server", address, "--data", shard), ("--data", shard), ()):
        said = federation.command("fedclient", "doctor", *words).stdout
        assert "ok    identity: ada, certificate until" in said, words
        assert f"ok    server: {address} lets ada in" in said, words
    time.sleep(2 * LOOK_S + 1)
    assert "refused" not in server.text
    federation.command("fedserver", "revoke", "ada")
    said = federation.command("fedclient", "doctor", "--server", address, code=1).stdout
    assert "FAIL  server:" in said, "a handshake alone lets a revoked device in"
    assert "revoked" in said
    assert server.stop() == 0
    assert server.text.rstrip().endswith("stopping: SIGTERM; what is accepted is kept, and the next start goes on"), server.text


def test_a_server_says_that_it_ends_because_all_is_done(federation_at: FederationAt) -> None:
    federation = federation_at("done")
    server = federation.server(*FLAGS, "--exit-when-done")
    device = federation.device(tabular_shard(federation.folder / "ada", seed=1))
    assert (server.code(), device.code()) == (0, 0)
    assert server.text.rstrip().endswith("stopping: all rounds are closed, and the devices have left (--exit-when-done)")


def test_a_server_that_starts_again_at_the_end_waits_for_devices_that_do_not_know_it(federation_at: FederationAt) -> None:
    """Before, the server left at once, and the devices tried to reach it for ever."""
    federation = federation_at("again")
    shards = [tabular_shard(federation.folder / name, seed) for seed, name in enumerate(("ada", "bob"))]
    flags = ("--exit-when-done", "--method", "fedavg", "--model", "mlr", "--min-clients", "2", "--rounds", "1")
    server = federation.server(*flags, fault="server:1:evaluation-committed=kill")
    first = federation.devices(shards)
    assert server.code() == -signal.SIGKILL
    for device in first:
        device.kill()
    server = federation.server(*flags)
    second = federation.devices(shards)
    assert [process.code() for process in (*second, server)] == [0, 0, 0], server.text
    assert "waiting up to 30 s for devices that left before they knew the end: ada, bob" in server.text


def test_a_server_whose_model_needs_a_missing_package_ends_at_once_and_names_it(federation_at: FederationAt) -> None:
    """Before, it said "(trying again)" and waited: only the call of the factory imports the package."""
    federation = federation_at("late")
    (federation.folder / "late_model.py").write_text("def make(spec):\n    import no_such_package\n")
    places = os.pathsep.join(filter(None, [str(federation.folder), os.environ.get("PYTHONPATH", "")]))
    federation.environment |= {"PYTHONPATH": places}
    server = federation.server("--method", "fedavg", "--model", "late_model:make", "--min-clients", "1")
    device = federation.device(tabular_shard(federation.folder / "ada", seed=1))
    assert server.code() == 2, server.text
    assert "Traceback" not in server.text
    [line] = [line for line in server.text.splitlines() if line.startswith("fedserver: ")]
    assert "No module named 'no_such_package'" in line
    assert "install it on the server and on every device" in line
    device.kill()


def test_a_server_that_cannot_write_says_why_to_the_device(federation_at: FederationAt) -> None:
    """Before, the device read only that the log of the server says why."""
    federation = federation_at("readonly")
    server = federation.server(*FLAGS, "--set", "server.inline_bytes=0", fault="server:1:inbox-renamed=raise-EROFS")
    hand = Hand(server.port, server.join_token, "ada")
    order = hand.connect().next("order")
    why = "the server cannot do this now (Read-only file system)"
    kind, said = refusal(lambda: hand.answer(order))
    assert kind == "ledger-busy", "the device sends again"
    assert why in said
    assert str(federation.home) not in said
    server.wait_for("disk: .*Read-only file system.* \\(trying again\\)")
    assert hand.answer(order)
    server.wait_for("disk: goes on")
    assert "Traceback" not in server.text
