"""An operator pauses a running server, and reads its audit log."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from attune.common.faults import VARIABLE
from attune.common.identity.credential import Credential
from attune.common.identity.token import JoinToken
from attune.common.pb import federation_pb2 as pb
from attune.fedserver.pb import admin_pb2
from attune.fedserver.pb.admin_pb2_grpc import AdminStub
from tests.e2e.hand import Caller, Hand, kind_of
from tests.e2e.harness import Federation, FederationAt, Process, digit_shards, until

FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", "2", "--rounds", "3")


def events(federation: Federation, *flags: str) -> list[dict[str, object]]:
    shown = federation.command("fedserver", "audit", "--json", *flags).stdout
    return [json.loads(line) for line in shown.splitlines()]


def test_a_paused_federation_ends_its_round_and_resumes_after_a_restart(federation_at: FederationAt) -> None:
    federation = federation_at("paused")
    server = federation.server(*FLAGS)
    hands = {name: Hand(server.port, server.join_token, name) for name in ("ada", "bob")}
    streams = {name: hand.connect() for name, hand in hands.items()}
    orders = {name: stream.next("order") for name, stream in streams.items()}
    said = federation.command("fedserver", "pause").stdout
    assert "training goes on to its end" in said
    for name, hand in hands.items():
        assert hand.answer(orders[name]).status == pb.Receipt.STATUS_ACCEPTED
    status = federation.await_status(lambda status: status["round"] == 1)
    assert (status["paused"], status["phase"]) == (True, "waiting")
    assert "paused: no further round opens" in federation.command("fedserver", "status").stdout
    server.kill()
    again = federation.server()
    streams = {name: hand.connect() for name, hand in hands.items()}
    for stream in streams.values():
        stream.next("welcome")
    assert federation.status()["phase"] == "waiting"
    federation.command("fedserver", "resume")
    assert {stream.next("order").round for stream in streams.values()} == {2}
    again.stop()
    assert "no server runs" in federation.command("fedserver", "pause").stdout
    assert federation.status()["paused"]
    assert [each["event"] for each in events(federation) if each["event"] in ("paused", "resumed")] == [
        "paused", "resumed", "paused",
    ]  # fmt: skip


def test_the_audit_log_tells_who_came_who_was_refused_and_what_changed_and_by_whom(federation_at: FederationAt) -> None:
    federation = federation_at("audited")
    server = federation.server(*FLAGS)
    ada = Hand(server.port, server.join_token, "ada")
    assert kind_of(lambda: Hand(server.port, server.join_token, "ada")) == "name-taken"
    federation.command("fedserver", "revoke", "ada")
    until(lambda: [each for each in events(federation) if each["event"] == "refused"], "the refusal to be written")
    server.stop()
    federation.server("--set", "server.keepalive_s=3").stop()
    found = events(federation)
    told = {each["event"]: each for each in found}
    assert told["enrolled"]["facts"]["name"] == ada.name  # type: ignore[index]
    assert told["refused"]["facts"]["kind"] == "name-taken"  # type: ignore[index]
    assert told["device revoked"]["facts"] == {"name": "ada"}
    assert str(told["device revoked"]["by"]).startswith("operator ")
    assert told["settings"]["facts"] == {"changed": {"server.keepalive_s": [None, 3]}}
    text = federation.command("fedserver", "audit", "--last", "3").stdout.splitlines()
    assert len(text) == 4 and "each follows the one before" in text[-1]
    noted = str(found[2]["digest"])
    federation.command("fedserver", "audit", "--contains", noted)
    log = federation.home / "audit.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
    federation.command("fedserver", "audit")
    assert "cut or replaced" in federation.command("fedserver", "audit", "--contains", noted, code=4).stderr
    log.write_bytes(log.read_bytes().replace(b"operator", b"somebody", 1))
    assert "line 2" in federation.command("fedserver", "audit", code=4).stderr
    assert "audit.jsonl" in federation.command("fedserver", "verify", code=4).stdout


def test_a_server_killed_in_the_middle_of_a_line_starts_again_and_its_log_is_whole(
    federation_at: FederationAt, tmp_path: Path
) -> None:
    federation = federation_at("torn")
    federation.server(*FLAGS).stop()
    script = str(Path(sys.executable).with_name("fedserver"))
    killed = Process(
        [script, "--home", str(federation.home), "--host", "127.0.0.1", "--port", "0"],
        tmp_path / "killed.log",
        federation.environment | {VARIABLE: "server:0:audit-half=kill"},
    )
    assert killed.code() == -9
    log = federation.home / "audit.jsonl"
    assert not log.read_bytes().endswith(b"\n")
    assert "each follows the one before" in federation.command("fedserver", "audit").stdout
    server = federation.server()
    assert [each["event"] for each in events(federation)].count("cut off") == 1
    Hand(server.port, server.join_token, "ada")
    assert msgspec.json.decode(log.read_bytes().splitlines()[-1])["event"] == "enrolled"


def test_what_the_commands_do_can_be_done_over_the_network(federation_at: FederationAt) -> None:
    federation = federation_at("remote")
    server = federation.server(*FLAGS)
    root = (federation.home / "ca" / "ca.pem").read_bytes()
    operator = Caller(server.port, root, Credential.load(federation.home / "operator", "operator"))
    admin: Any = AdminStub(operator.channel)
    made = admin.NewToken(admin_pb2.NewTokenRequest(uses=2, ttl_s=60)).token
    ada = Hand(server.port, made, "ada")
    stream = ada.connect()
    stream.next("notice")
    label = JoinToken.parse(made).label
    [token] = [each for each in admin.Tokens(admin_pb2.TokensRequest()).tokens if each.id == label]
    assert (token.state, token.uses, token.uses_left, list(token.devices)) == ("live", 2, 1, ["ada"])
    assert admin.Pause(admin_pb2.PauseRequest(paused=True)).phase == "waiting"
    assert federation.status()["paused"]
    assert list(admin.RevokeToken(admin_pb2.RevokeTokenRequest(id=label, devices=True)).revoked) == ["ada"]
    assert kind_of(stream.end) == "certificate-refused"
    bob = Hand(server.port, admin.NewToken(admin_pb2.NewTokenRequest()).token, "bob")
    assert admin.Revoke(admin_pb2.RevokeRequest(name="bob")).connected == 0
    assert kind_of(lambda: bob.download("sha256:" + "0" * 64)) == "certificate-refused"
    assert kind_of(lambda: admin.Revoke(admin_pb2.RevokeRequest(name="nobody"))) == "setting"
    assert kind_of(lambda: admin.NewToken(admin_pb2.NewTokenRequest(ttl_s=-1))) == "setting"
    assert kind_of(lambda: admin.RevokeToken(admin_pb2.RevokeTokenRequest(id="0" * 16))) == "setting"
    operator.close()


def test_only_devices_with_the_tag_train_also_after_a_kill_and_views_group_by_it(
    federation_at: FederationAt, tmp_path: Path
) -> None:
    federation = federation_at("tagged")
    server = federation.server(*FLAGS, "--set", "round.devices=tag:icu", fault="server:2:aggregated=kill")
    token = federation.command("fedserver", "token", "--tag", "icu").stdout.strip()
    for_all = {0: ("--token", token, "--tag", "ward"), 1: ("--tag", "icu"), 2: ("--tag", "ward"), 3: ()}
    shards = digit_shards(tmp_path, 4, 24, 12)
    devices = [federation.device(shard, *for_all[place], "--baseline", "none") for place, shard in enumerate(shards)]
    assert server.code() < 0, "killed"
    federation.server()
    assert [device.code() for device in devices] == [0] * 4, [device.text for device in devices]
    status = federation.await_status(lambda status: status["state"] == "done")
    names = [shard.name for shard in shards]
    tags = {client["name"]: client["tag"] for client in status["clients"]}
    assert tags == dict(zip(names, ("icu", "icu", "ward", None), strict=True)), "the operator's tag wins"
    trained = {(row["client"], row["work"]) for row in federation.metrics()}
    assert {name for name, work in trained if work == "train"} == {*names[:2]}
    assert {name for name, work in trained if work == "evaluate"} == {*names}
    shown = federation.command("fedserver", "status").stdout
    assert "icu: 2 devices, mean accuracy " in shown and "ward: 1 devices" in shown and "without a tag: 1 devices" in shown
    refused = federation.command("fedclient", "--data", str(shards[0]), "--server", "localhost:1", "--tag", "a b", code=None)
    assert refused.returncode != 0 and "'a b' is no tag" in refused.stderr
