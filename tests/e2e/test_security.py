"""Authentication and authorisation over the wire, against a running server."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from attune.common.identity.credential import Credential, csr_der, new_key
from attune.common.pb import federation_pb2 as pb
from attune.fedserver.identity.authority import Authority
from tests.e2e.hand import CALL_S, Caller, Hand, kind_of
from tests.e2e.harness import FederationAt

FEDTP = ("--model", "transformer", "--min-clients", "2", "--rounds", "3", "--set", "model.width=8", "--set", "model.depth=1")


@pytest.fixture(scope="module")
def running(federation_at: FederationAt) -> SimpleNamespace:
    """Run a FedTP server with two devices, each with an open order, and the operator's credential."""
    federation = federation_at("security")
    server = federation.server(*FEDTP)
    ada, bob = (Hand(server.port, server.join_token, name) for name in ("ada", "bob"))
    streams = [device.connect() for device in (ada, bob)]
    orders = [stream.next("order") for stream in streams]
    return SimpleNamespace(
        federation=federation, server=server, ada=ada, bob=bob, orders=orders, streams=streams, ca=ada.ca_pem, port=server.port
    )


def submit(caller: Caller, order_id: str = "train-1-ada") -> Any:
    return caller.federation.Submit(pb.Update(order_id=order_id), timeout=CALL_S)


# --- the handshake


def test_a_certificate_that_was_signed_but_never_issued_is_refused(running):
    """Steal the authority's key, which is not enough: the server does not know the certificate's fingerprint."""
    key = new_key()
    pem = Authority.load(running.federation.home / "ca").issue_device(csr_der(key, "ada"), "ada", 1.0)
    assert kind_of(lambda: submit(Caller(running.port, running.ca, Credential(key, pem)))) == "forbidden"


# --- orders and blobs of other devices


def test_each_device_gets_its_own_weights_and_never_another_s(running):
    (ada, bob), (hers, his) = (running.ada, running.bob), ({r.part: r for r in o.downloads} for o in running.orders)
    assert hers["shared"].digest == his["shared"].digest
    assert hers["generated"].digest != his["generated"].digest
    assert len(ada.download(hers["generated"].digest)) == hers["generated"].size
    assert kind_of(lambda: bob.download(hers["generated"].digest)) == "unknown-blob"
    assert kind_of(lambda: ada.download(his["generated"].digest, offset=8)) == "unknown-blob"


# --- renewal and revocation (last, because they change who is admitted)


def test_a_revoked_device_is_cut_off_at_once_and_stays_out(running):
    federation, bob = running.federation, running.bob
    federation.command("fedserver", "revoke", "bob")
    assert kind_of(running.streams[1].end) == "certificate-refused"
    calls: list[Callable[[], Any]] = [
        lambda: bob.submit("train-1-bob"),
        lambda: bob.connect().end(),
        lambda: bob.download(running.orders[1].downloads[0].digest),
        lambda: bob.federation.Renew(pb.RenewRequest(csr_der=csr_der(new_key(), "bob")), timeout=CALL_S),
        lambda: Hand(running.port, running.server.join_token, "bob", key=bob.key),
    ]
    assert {kind_of(call) for call in calls} == {"certificate-refused"}
    assert federation.client("bob")["state"] == "revoked"
    assert federation.client("ada")["state"] == "working"
    unknown = federation.command("fedserver", "revoke", "bop", code=2)
    assert "did you mean 'bob'" in unknown.stderr


def test_the_server_stops_well_while_devices_are_connected(running):
    """Stop the server after all the refusals above: none of them has done harm."""
    assert running.server.stop() == 0
    running.streams[0].end()
    assert "Traceback" not in running.server.text, running.server.text
