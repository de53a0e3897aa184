"""A power cut takes the end of the database's write-ahead log: decisions about trust are taken from the audit log again."""

import json
from pathlib import Path

from tests.e2e.harness import FederationAt, tabular_shard

FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", "9")


def test_a_revocation_and_an_enrolment_that_were_acknowledged_are_kept(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("cut")
    log = federation.home / "state.sqlite-wal"
    first, second = (tabular_shard(tmp_path / f"s{number}", number) for number in range(2))
    server = federation.server(*FLAGS)
    device = federation.device(first)
    federation.await_status(lambda status: any(client["state"] == "idle" for client in status["clients"]))
    name = federation.status()["clients"][0]["name"]
    kept = log.read_bytes()
    federation.command("fedserver", "revoke", name)
    assert device.code() == 14
    other = federation.device(second)
    other.wait_for("enrolled as")
    other.stop()
    server.kill()
    log.write_bytes(kept)

    named = federation.command("fedserver", "verify", "--home", str(federation.home), code=4).stdout
    assert f"{name} was revoked" in named and "was enrolled" in named
    server = federation.server(*FLAGS)
    server.wait_for(f"{name} was revoked")
    assert federation.device(first).code() == 14
    again = federation.device(second)
    federation.await_status(lambda status: any(client["state"] == "idle" for client in status["clients"]))
    again.stop()
    assert server.stop() == 0
    assert "is whole" in federation.command("fedserver", "verify", "--home", str(federation.home)).stdout
    events = [json.loads(line)["event"] for line in federation.command("fedserver", "audit", "--json").stdout.splitlines()]
    assert "repaired from the audit log" in events


def test_a_device_whose_enrolment_is_lost_is_told_what_to_do(federation_at: FederationAt, tmp_path: Path) -> None:
    """Lose the audit log too, as with an older backup."""
    federation = federation_at("lost")
    shard = tabular_shard(tmp_path / "s", 0)
    server = federation.server(*FLAGS)
    kept = {name: (federation.home / name).read_bytes() for name in ("state.sqlite-wal", "audit.jsonl")}
    device = federation.device(shard)
    name = device.wait_for("enrolled as (.*)").group(1)
    device.stop()
    server.kill()
    for file, content in kept.items():
        (federation.home / file).write_bytes(content)

    federation.server(*FLAGS)
    refused = federation.device(shard)
    assert refused.code() == 16
    assert "fedserver token --for NAME" in refused.text and "--token-file" in refused.text
    made = federation.command("fedserver", "token", "--for", name)
    assert "enrolment was lost" in made.stderr
    again = federation.device(shard, "--token", made.stdout.strip())
    again.wait_for("enrolling again with the same key")
    federation.await_status(lambda status: any(client["state"] == "idle" for client in status["clients"]))
    again.stop()
