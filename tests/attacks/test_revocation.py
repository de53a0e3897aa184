"""A revoked device tries to continue."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from attune.common.pb import federation_pb2 as pb
from attune.common.wire.digest import digest_of
from tests.e2e.hand import PROFILE, Hand, Stream, kind_of
from tests.e2e.harness import Federation, Server, until

FLAGS = ("--method", "fedavg", "--model", "mlr", "--rounds", "2", "--set", "round.quorum=1")


@dataclass
class Scene:
    federation: Federation
    server: Server

    def device(self, name: str) -> Hand:
        return Hand(self.server.port, self.server.join_token, name)

    def revoke(self, name: str) -> None:
        self.federation.command("fedserver", "revoke", name)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    federation = Federation(tmp_path)
    yield Scene(federation, federation.server(*FLAGS, "--min-clients", "2"))
    federation.close()


def test_a_stream_that_has_not_said_hello_yet_gets_neither_plan_nor_order(scene: Scene) -> None:
    mallory = scene.device("mallory")
    waiting = Stream(mallory)
    for stream in [scene.device(name).connect() for name in ("ada", "bob")]:
        stream.next("order")
    scene.revoke("mallory")
    hello = pb.Hello(protocol=1, software="late", profile_json=msgspec.json.encode(PROFILE))
    waiting.say(hello=hello)
    assert kind_of(lambda: waiting.next("welcome")) == "certificate-refused"


def test_an_open_upload_ends(scene: Scene) -> None:
    mallory, ada = scene.device("mallory"), scene.device("ada")
    streams = [mallory.connect(), ada.connect()]
    order = streams[0].next("order")
    data = b"x" * 200
    frames: queue.Queue[bytes | None] = queue.Queue()
    frames.put(data[:100])
    target = pb.UploadTarget(order_id=order.id, part="shared", digest=digest_of(data), size=len(data))
    call = mallory.channel.stream_unary("/attune.v1.Blobs/Upload", request_serializer=None, response_deserializer=None)
    going = call.future(iter(frames.get, None), metadata=(("attune-upload-bin", target.SerializeToString()),), timeout=60)
    until(lambda: list((scene.federation.home / "uploads").rglob("*")), "the upload to have begun")
    scene.revoke("mallory")
    frames.put(data[100:])
    frames.put(None)
    assert kind_of(going.result) == "certificate-refused"


def test_an_update_that_was_accepted_in_the_same_round_does_not_count(scene: Scene) -> None:
    """Hand in an update with the largest weight, 1,000, and revoke the device."""
    mallory, ada = scene.device("mallory"), scene.device("ada")
    streams = {"mallory": mallory.connect(), "ada": ada.connect()}
    orders = {name: stream.next("order") for name, stream in streams.items()}
    assert mallory.answer(orders["mallory"], change=1000.0).status == pb.Receipt.STATUS_ACCEPTED
    scene.revoke("mallory")
    until(lambda: not any("mallory" in name for name in scene.federation.inbox()), "its update to leave the inbox")
    assert ada.answer(orders["ada"], change=0.5).status == pb.Receipt.STATUS_ACCEPTED
    scene.federation.await_status(lambda status: status["round"] == 1)
    bob = scene.device("bob")
    bob.connect()
    [served] = ada.served(streams["ada"].next("order")).values()
    assert max(float(abs(tensor).max()) for tensor in served.values()) < 10


def test_a_revoked_key_does_not_come_back_under_another_name(scene: Scene) -> None:
    mallory = scene.device("mallory")
    scene.revoke("mallory")
    token = scene.server.join_token
    assert kind_of(lambda: Hand(scene.server.port, token, "innocent", key=mallory.key)) == "certificate-refused"
    assert scene.device("carl").name == "carl"


def test_a_name_that_a_thief_had_is_used_again_and_the_thief_is_refused(scene: Scene) -> None:
    thief, bob = scene.device("ada"), scene.device("bob")
    for stream in [device.connect() for device in (thief, bob)]:
        stream.next("order")
    scene.revoke("ada")
    made = scene.federation.command("fedserver", "token", "--for", "ada", "--home", str(scene.federation.home))
    owner = Hand(scene.server.port, made.stdout.strip(), "ada")
    owner.connect().next("welcome")
    assert kind_of(thief.connect().end) == "certificate-refused"
    states = {client["name"]: client["state"] for client in scene.federation.status()["clients"]}
    [former] = [name for name in states if name.startswith("ada.revoked-")]
    assert states[former] == "revoked" and states["ada"] != "revoked"
    events = scene.federation.command("fedserver", "audit", "--home", str(scene.federation.home)).stdout
    assert "name of a revoked device given to another" in events
