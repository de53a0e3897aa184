"""Authentication and authorisation over the wire, against a running server."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from attune.common.identity.certificates import CLIENT, Lifetime, leaf_certificate, subject
from attune.common.identity.credential import Credential, csr_der, key_pem, load_certificate, load_key, new_key
from attune.common.identity.token import JoinToken
from attune.common.pb import federation_pb2 as pb
from attune.common.wire.digest import digest_of
from attune.fedserver.identity.authority import Authority
from tests.e2e.hand import CALL_S, Caller, Hand, kind_of, refusal
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


def status_of(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    assert not dict(error.trailing_metadata() or ()).get("attune-error"), "refused by a handler, not by the handshake"
    code: grpc.StatusCode = error.code()
    return code


def submit(caller: Caller, order_id: str = "train-1-ada") -> Any:
    return caller.federation.Submit(pb.Update(order_id=order_id), timeout=CALL_S)


# --- the handshake


def test_an_expired_certificate_is_refused(running):
    key = new_key()
    authority = Authority.load(running.federation.home / "ca")
    pem = authority.issue_device(csr_der(key, "ada"), "ada", 1.0, now=datetime.now(timezone.utc) - timedelta(days=3))
    caller = Caller(running.port, running.ca, Credential(key, pem))
    assert status_of(lambda: submit(caller)) is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_that_was_signed_but_never_issued_is_refused(running):
    """Steal the authority's key, which is not enough: the server does not know the certificate's fingerprint."""
    key = new_key()
    pem = Authority.load(running.federation.home / "ca").issue_device(csr_der(key, "ada"), "ada", 1.0)
    assert kind_of(lambda: submit(Caller(running.port, running.ca, Credential(key, pem)))) == "forbidden"


def test_a_token_holder_cannot_mint_certificates(running):
    """Sign with the bootstrap certificate, which is a trust root of the handshake, but must not vouch for others."""
    bootstrap = JoinToken.parse(running.server.join_token).bootstrap()
    key, issuer = load_key(new_key()), load_certificate(bootstrap.certificate_pem)
    now = datetime.now(timezone.utc)
    minted = leaf_certificate(
        key.public_key(), subject("ada"), CLIENT, Lifetime(now - timedelta(hours=1), now + timedelta(days=1)),
        issuer=issuer.subject, signer=load_key(bootstrap.key_pem),
    )  # fmt: skip
    pem = minted.public_bytes(Encoding.PEM)
    for chain in (pem, pem + bootstrap.certificate_pem):
        caller = Caller(running.port, running.ca, Credential(key_pem(key), chain))
        assert status_of(lambda caller=caller: submit(caller)) is grpc.StatusCode.UNAVAILABLE


# --- tokens


def test_a_token_of_another_federation_is_not_even_let_in(running, tmp_path):
    other = JoinToken.new(Authority.create(tmp_path).public_key_compressed)
    caller = Caller(running.port, running.ca, other.bootstrap())
    request = pb.EnrolRequest(name="dora", csr_der=csr_der(new_key(), "dora"))
    assert status_of(lambda: caller.federation.Enrol(request, timeout=CALL_S)) is grpc.StatusCode.UNAVAILABLE


def test_a_name_belongs_to_its_key(running):
    kind, message = refusal(lambda: Hand(running.port, running.server.join_token, "ada"))
    assert (kind, "--name" in message) == ("name-taken", True)


@pytest.mark.parametrize("name", ["", "../ada", "a" * 65, "-rf", "a/b", "ada\n"])
def test_impossible_names_and_requests_are_refused(running, name):
    assert kind_of(lambda: Hand(running.port, running.server.join_token, name)) == "setting"


@pytest.mark.parametrize("request_der", [b"", b"nonsense", b"0" * 5000])
def test_damaged_certificate_requests_are_refused(running, request_der):
    token = JoinToken.parse(running.server.join_token)
    holder = Caller(running.port, token.trust_anchor_pem(), token.bootstrap())
    request = pb.EnrolRequest(name="eve", csr_der=request_der)
    assert kind_of(lambda: holder.federation.Enrol(request, timeout=CALL_S)) == "request-refused"
    assert kind_of(lambda: running.ada.federation.Renew(pb.RenewRequest(csr_der=request_der))) == "request-refused"


# --- orders and blobs of other devices


def test_each_device_gets_its_own_weights_and_never_another_s(running):
    (ada, bob), (hers, his) = (running.ada, running.bob), ({r.part: r for r in o.downloads} for o in running.orders)
    assert hers["shared"].digest == his["shared"].digest
    assert hers["generated"].digest != his["generated"].digest
    assert len(ada.download(hers["generated"].digest)) == hers["generated"].size
    assert kind_of(lambda: bob.download(hers["generated"].digest)) == "unknown-blob"
    assert kind_of(lambda: ada.download(his["generated"].digest, offset=8)) == "unknown-blob"


def test_an_answer_to_another_device_s_order_is_refused(running):
    ada, order = running.ada, running.orders[1].id
    assert kind_of(lambda: ada.submit(order)) == "update-refused"
    assert kind_of(lambda: ada.upload(order, "shared", [b"x"], digest_of(b"x"), 1)) == "update-refused"
    target = pb.UploadTarget(order_id=order, part="shared", digest="0" * 64, size=1)
    assert kind_of(lambda: ada.blobs.UploadOffset(target, timeout=CALL_S)) == "update-refused"
    assert running.federation.client("bob")["state"] == "working"


# --- operators


# --- renewal and revocation (last, because they change who is admitted)


def test_renewal_gives_a_new_certificate_and_the_old_one_stays_good(running):
    key = new_key()
    answer = running.ada.federation.Renew(pb.RenewRequest(csr_der=csr_der(key, "someone-else")), timeout=CALL_S)
    assert answer.name == "ada"
    renewed = Caller(running.port, running.ca, Credential(key, answer.certificate_pem))
    for caller in (renewed, running.ada):
        assert kind_of(lambda caller=caller: submit(caller, "train-1-bob")) == "update-refused"


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
