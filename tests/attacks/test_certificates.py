"""Certificates and tokens that are not valid any more, revoked ones, and devices that ask for too many."""

import queue
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec
import pytest

from attune.common.identity.credential import Credential, csr_der, new_key
from attune.common.identity.token import JoinToken
from attune.common.pb import federation_pb2 as pb
from attune.common.wire.digest import digest_of
from tests.e2e.hand import PROFILE, Caller, Hand, Stream, kind_of, refusal
from tests.e2e.harness import Federation, FederationAt, Server, until

FLAGS = ("--method", "fedavg", "--model", "mlr", "--min-clients", "9")
SHORT = ("--set", "server.certificate_days=0.0007")
Scene = tuple[Federation, Server]


@pytest.fixture(scope="module")
def scene(federation_at: FederationAt) -> Scene:
    federation = federation_at("certificates")
    return federation, federation.server(*FLAGS, *SHORT)


def enrolled(scene: Scene, name: str, **more: Any) -> Hand:
    return Hand(scene[1].port, scene[1].join_token, name, **more)


def token(federation: Federation, *flags: str) -> str:
    return federation.command("fedserver", "token", *flags).stdout.strip()


def called(hand: Hand) -> Hand:
    """Make a call, which is refused, so that the device has shown its certificate to the server."""
    with pytest.raises(grpc.RpcError):
        hand.download("sha256:" + "0" * 64)
    return hand


def renew(hand: Hand, key: bytes) -> pb.Certificate:
    return hand.federation.Renew(pb.RenewRequest(csr_der=csr_der(key, hand.name)), timeout=30)


def in_database(federation: Federation, query: str, *values: Any) -> list[Any]:
    with sqlite3.connect(federation.home / "state.sqlite") as database:
        return database.execute(query, values).fetchall()


def test_a_thousand_renewals_are_refused_and_the_database_does_not_grow(scene: Scene) -> None:
    mallory, kinds = enrolled(scene, "mallory-renews"), list[str]()
    for _ in range(1000):
        try:
            renew(mallory, mallory.key)
        except grpc.RpcError as error:
            kinds.append(dict(error.trailing_metadata())["attune-error"])
    assert len(kinds) > 900 and set(kinds) == {"too-many"}
    [[rows]] = in_database(scene[0], "SELECT COUNT(*) FROM certificates WHERE name = ?", mallory.name)
    assert rows < 20


def test_a_renewed_certificate_ends_the_one_before_and_its_stream(scene: Scene) -> None:
    """Renew after a sixth of the lifetime, here ten seconds. A thief of the old certificate is out, and the device goes on."""
    thief = enrolled(scene, "eve")
    stream, key = thief.connect(), new_key()
    stream.next("notice")
    answer = renew(thief, key)
    device = Caller(scene[1].port, answer.ca_pem, Credential(key, answer.certificate_pem))
    assert kind_of(lambda: device.federation.Submit(pb.Update(order_id="x"), timeout=30)) == "update-refused"
    kind, message = refusal(stream.end)
    assert (kind, "newer certificate" in message) == ("certificate-refused", True)
    assert kind_of(lambda: thief.download("sha256:" + "0" * 64)) == "certificate-refused"
    assert kind_of(lambda: device.federation.Submit(pb.Update(order_id="x"), timeout=30)) == "update-refused"


def test_a_renewal_whose_answer_was_lost_locks_nobody_out(scene: Scene) -> None:
    ada = enrolled(scene, "ada-loses-answers")
    for _ in range(3):
        renew(ada, new_key())
    time.sleep(12)
    assert kind_of(lambda: ada.federation.Submit(pb.Update(order_id="x"), timeout=30)) == "update-refused"


@pytest.mark.parametrize("state", ["used up", "expired", "withdrawn"])
def test_a_token_that_is_over_buys_no_fresh_certificate_for_an_old_device(scene: Scene, state: str) -> None:
    federation, server = scene
    text = token(federation, "--uses", "1" if state == "used up" else "2")
    name = f"mallory-{state.replace(' ', '-')}"
    mallory, label = called(Hand(server.port, text, name)), JoinToken.parse(text).id.hex()
    match state:
        case "expired":
            bootstrap = JoinToken.parse(text).bootstrap().certificate_pem
            in_database(federation, "UPDATE tokens SET expires_at = ? WHERE bootstrap_pem = ?", time.time() - 1, bootstrap)
        case "withdrawn":
            federation.command("fedserver", "token", "revoke", label)
    kind, message = refusal(lambda: Hand(server.port, text, name, key=mallory.key))
    assert (kind, state.split()[0] in message) == ("token-refused", True), message


def test_an_operator_s_token_brings_back_the_device_that_it_names_and_no_other(scene: Scene) -> None:
    federation, server = scene
    ada = called(enrolled(scene, "ada-comes-back"))
    text = token(federation, "--for", ada.name)
    assert kind_of(lambda: Hand(server.port, text, "mallory-instead")) == "token-refused"
    assert kind_of(lambda: Hand(server.port, text, ada.name)) == "name-taken"
    assert called(Hand(server.port, text, ada.name, key=ada.key)).name == ada.name
    assert kind_of(lambda: Hand(server.port, text, ada.name, key=ada.key)) == "token-refused"
    assert federation.command("fedserver", "token", "--for", "no name", code=2).stdout == ""
    unknown = federation.command("fedserver", "token", "--for", "nobody").stderr
    assert "no device 'nobody' is enrolled here" in unknown and "whose enrolment was lost" in unknown


def test_devices_of_one_token_are_revoked_together(scene: Scene) -> None:
    """Enrol Sybils: twenty silent devices with one token."""
    federation, server = scene
    text = token(federation, "--uses", "20")
    sybils = [Hand(server.port, text, f"sybil{number}") for number in range(20)]
    streams = [sybil.connect() for sybil in sybils[:3]]
    honest = called(enrolled(scene, "ada-is-honest"))
    [listed] = [each for each in tokens(federation) if each["devices"] == sorted(sybil.name for sybil in sybils)]
    assert (listed["uses"], listed["uses_left"], listed["state"]) == (20, 0, "used up")
    shown = federation.command("fedserver", "token", "revoke", listed["id"], "--devices").stdout
    assert shown.count(" is revoked") == 20
    assert {kind_of(stream.end) for stream in streams} == {"certificate-refused"}
    assert {kind_of(lambda each=each: renew(each, new_key())) for each in sybils} == {"certificate-refused"}
    assert renew(honest, new_key()).certificate_pem


def tokens(federation: Federation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = msgspec.json.decode(federation.command("fedserver", "token", "list", "--json").stdout)
    return found


def test_the_printed_token_admits_one_device_and_says_so(federation_at: FederationAt) -> None:
    """Ask the command for its default, because the harness asks for more."""
    federation = federation_at("printed")
    server = federation.server(*FLAGS, "--join-uses", "1")
    assert "this token admits one device" in until(lambda: server.text.count("admits") and server.text, "the line")
    Hand(server.port, server.join_token, "ada")
    kind, message = refusal(lambda: Hand(server.port, server.join_token, "mallory"))
    assert (kind, "used up" in message) == ("token-refused", True)
    helped = federation.command("fedserver", "--help").stdout
    assert "--join-uses" in helped and "[default: 1;" in " ".join(helped.split())


def test_what_expires_soon_is_in_the_status(scene: Scene) -> None:
    federation = scene[0]
    away: Callable[[], list[dict[str, Any]]] = lambda: [  # noqa: E731
        each for each in federation.status()["expiring"] if each["name"] == "kiel-is-away"
    ]
    called(enrolled(scene, "kiel-is-away"))
    assert away() == []
    change = "UPDATE certificates SET not_after = ?1 + ?2, issued_at = ?1 - 55 WHERE name = 'kiel-is-away'"
    in_database(federation, change, time.time(), 5)
    [soon] = away()
    assert not soon["expired"] and "kiel-is-away" in soon["todo"]
    in_database(federation, change, time.time(), -5)
    [over] = away()
    assert over["expired"] and "fedserver token --for kiel-is-away" in over["todo"]
    assert "certificate of kiel-is-away expired on" in federation.command("fedserver", "status").stdout


QUORUM_FLAGS = ("--method", "fedavg", "--model", "mlr", "--rounds", "2", "--set", "round.quorum=1")


@dataclass
class Federated:
    federation: Federation
    server: Server

    def device(self, name: str) -> Hand:
        return Hand(self.server.port, self.server.join_token, name)

    def revoke(self, name: str) -> None:
        self.federation.command("fedserver", "revoke", name)


@pytest.fixture
def federated(federation_at: FederationAt) -> Federated:
    federation = federation_at("federated")
    return Federated(federation, federation.server(*QUORUM_FLAGS, "--min-clients", "2"))


def test_a_stream_that_has_not_said_hello_yet_gets_neither_plan_nor_order(federated: Federated) -> None:
    mallory = federated.device("mallory")
    waiting = Stream(mallory)
    for stream in [federated.device(name).connect() for name in ("ada", "bob")]:
        stream.next("order")
    federated.revoke("mallory")
    hello = pb.Hello(protocol=1, software="late", profile_json=msgspec.json.encode(PROFILE))
    waiting.say(hello=hello)
    assert kind_of(lambda: waiting.next("welcome")) == "certificate-refused"


def test_an_open_upload_ends(federated: Federated) -> None:
    mallory, ada = federated.device("mallory"), federated.device("ada")
    streams = [mallory.connect(), ada.connect()]
    order = streams[0].next("order")
    data = b"x" * 200
    frames: queue.Queue[bytes | None] = queue.Queue()
    frames.put(data[:100])
    target = pb.UploadTarget(order_id=order.id, part="shared", digest=digest_of(data), size=len(data))
    call = mallory.channel.stream_unary("/attune.v1.Blobs/Upload", request_serializer=None, response_deserializer=None)
    going = call.future(iter(frames.get, None), metadata=(("attune-upload-bin", target.SerializeToString()),), timeout=60)
    until(lambda: list((federated.federation.home / "uploads").rglob("*")), "the upload to have begun")
    federated.revoke("mallory")
    frames.put(data[100:])
    frames.put(None)
    assert kind_of(going.result) == "certificate-refused"


def test_an_update_that_was_accepted_in_the_same_round_does_not_count(federated: Federated) -> None:
    """Hand in an update with the largest weight, 1,000, and revoke the device."""
    mallory, ada = federated.device("mallory"), federated.device("ada")
    streams = {"mallory": mallory.connect(), "ada": ada.connect()}
    orders = {name: stream.next("order") for name, stream in streams.items()}
    assert mallory.answer(orders["mallory"], change=1000.0).status == pb.Receipt.STATUS_ACCEPTED
    federated.revoke("mallory")
    until(lambda: not any("mallory" in name for name in federated.federation.inbox()), "its update to leave the inbox")
    assert ada.answer(orders["ada"], change=0.5).status == pb.Receipt.STATUS_ACCEPTED
    federated.federation.await_status(lambda status: status["round"] == 1)
    bob = federated.device("bob")
    bob.connect()
    [served] = ada.served(streams["ada"].next("order")).values()
    assert max(float(abs(tensor).max()) for tensor in served.values()) < 10
