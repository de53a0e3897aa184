"""Real mutual-TLS handshakes: accepted and refused certificates."""

import asyncio
import socket
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from attune.common.errors import Forbidden
from attune.common.identity.certificates import CLIENT, Lifetime, authority_certificate, leaf_certificate, subject
from attune.common.identity.credential import (
    Credential,
    fingerprint_of,
    key_pem,
    load_certificate,
    load_key,
    new_key,
    server_name,
)
from attune.common.identity.token import JoinToken
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials, peer_fingerprint


def _forged(issuer: x509.Name, signer: Credential) -> Credential:
    """Make a client certificate as the holder of `signer`'s key could, for a key of its own."""
    key = load_key(new_key())
    now = datetime.now(timezone.utc)
    lifetime = Lifetime(now - timedelta(days=1), now + timedelta(days=1))
    certificate = leaf_certificate(
        key.public_key(), subject("forged"), CLIENT, lifetime, issuer=issuer, signer=load_key(signer.key_pem)
    )
    return Credential(key_pem(key), certificate.public_bytes(Encoding.PEM))


async def test_a_device_is_known_by_its_certificate(
    authority: Authority, live: Any, device: Any, serve: Any, call: Any
) -> None:
    credential = device(authority)
    async with serve(live) as served:
        told = await call(served.port, authority.certificate_pem, credential)
        assert told == fingerprint_of(credential.certificate_pem)


async def test_a_token_opens_enrolment_for_as_long_as_it_is_trusted(
    authority: Authority, live: LiveServerCredentials, serve: Any, call: Any, refused: Any
) -> None:
    tokens = [JoinToken.new(authority.public_key_compressed) for _ in range(3)]
    joining = JoinToken.parse(tokens[1].encode())
    anchor, bootstrap = joining.trust_anchor_pem(), joining.bootstrap()
    ca, server = authority.certificate_pem, authority.issue_server()
    async with serve(live) as served:
        assert await refused(served.port, anchor, bootstrap)
        live.update([ca, *(token.bootstrap().certificate_pem for token in tokens)], server)
        told = await call(served.port, anchor, bootstrap)
        assert told == fingerprint_of(tokens[1].bootstrap().certificate_pem)
        live.update([ca, tokens[0].bootstrap().certificate_pem], server)
        assert await refused(served.port, anchor, bootstrap)
        assert len(served.callers) == 1


async def test_a_renewed_server_certificate_is_shown_while_serving(
    authority: Authority, stranger: Authority, device: Any, serve: Any, call: Any, refused: Any
) -> None:
    credential = device(authority)
    live = LiveServerCredentials([authority.certificate_pem], stranger.issue_server())
    async with serve(live) as served:
        assert await refused(served.port, authority.certificate_pem, credential)
        live.update([authority.certificate_pem], authority.issue_server())
        assert await call(served.port, authority.certificate_pem, credential)


async def test_without_a_certificate_nobody_gets_in(authority: Authority, live: Any, serve: Any, call: Any) -> None:
    async with serve(live) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(served.port, authority.certificate_pem, None)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert served.callers == []


async def test_certificates_that_no_device_should_have_are_refused(
    authority: Authority, stranger: Authority, device: Any, serve: Any, refused: Any
) -> None:
    token = JoinToken.new(authority.public_key_compressed)
    bootstrap = token.bootstrap()
    of_token = load_certificate(bootstrap.certificate_pem).subject
    ours = load_certificate(authority.certificate_pem).subject
    good = device(authority)
    impostor = load_key(new_key())
    lookalike = authority_certificate(impostor.public_key(), impostor).public_bytes(Encoding.PEM)
    minted = _forged(of_token, bootstrap)
    cases = {
        "issued by another federation": device(stranger),
        "expired": device(authority, days=1, now=datetime.now(timezone.utc) - timedelta(days=3)),
        "not yet valid": device(authority, now=datetime.now(timezone.utc) + timedelta(days=3)),
        "minted from the token": minted,
        "minted from the token, with its chain": Credential(minted.key_pem, minted.certificate_pem + bootstrap.certificate_pem),
        "minted by the token's key in the authority's name": _forged(ours, bootstrap),
        "minted by a device": _forged(load_certificate(good.certificate_pem).subject, good),
        "the token's name with another key": _forged(of_token, Credential(new_key(), b"")),
        "a server's certificate": authority.issue_server(),
        "self-made authority of the same name": Credential(key_pem(impostor), lookalike),
    }
    live = LiveServerCredentials([authority.certificate_pem, bootstrap.certificate_pem], authority.issue_server())
    async with serve(live) as served:
        for case, credential in cases.items():
            assert await refused(served.port, authority.certificate_pem, credential), case
        assert served.callers == []
        assert not await refused(served.port, authority.certificate_pem, good)


async def test_a_certificate_resigned_with_the_tokens_key_is_refused(authority: Authority, serve: Any, refused: Any) -> None:
    bootstrap = JoinToken.new(authority.public_key_compressed).bootstrap()
    name = load_certificate(bootstrap.certificate_pem).subject
    key = load_key(bootstrap.key_pem)
    lifetime = Lifetime(datetime(2020, 1, 1, tzinfo=timezone.utc), datetime(2090, 1, 1, tzinfo=timezone.utc))
    copy = leaf_certificate(key.public_key(), name, CLIENT, lifetime, issuer=name, signer=key)
    live = LiveServerCredentials([authority.certificate_pem, bootstrap.certificate_pem], authority.issue_server())
    async with serve(live) as served:
        resigned = Credential(bootstrap.key_pem, copy.public_bytes(Encoding.PEM))
        assert await refused(served.port, authority.certificate_pem, resigned)


async def test_devices_and_tokens_cannot_act_as_the_server(authority: Authority, device: Any, serve: Any, refused: Any) -> None:
    token = JoinToken.new(authority.public_key_compressed)
    # The name matches what clients look for, so that only the purpose of the certificate can stop it.
    false_servers = [device(authority, server_name(authority.certificate_pem)), token.bootstrap()]
    victim = device(authority, "victim")
    for false_server in false_servers:
        async with serve(LiveServerCredentials([authority.certificate_pem], false_server)) as served:
            for root_pem in (authority.certificate_pem, token.trust_anchor_pem()):
                assert await refused(served.port, root_pem, victim)
            assert served.callers == []


async def test_a_server_under_another_authority_learns_nothing(
    authority: Authority, stranger: Authority, device: Any, serve: Any, refused: Any
) -> None:
    token = JoinToken.new(authority.public_key_compressed)
    bootstrap = token.bootstrap()
    # The false server would accept every device.
    roots = [authority.certificate_pem, stranger.certificate_pem, bootstrap.certificate_pem]
    async with serve(LiveServerCredentials(roots, stranger.issue_server())) as served:
        assert await refused(served.port, authority.certificate_pem, device(authority))
        assert await refused(served.port, token.trust_anchor_pem(), bootstrap)
        assert served.callers == []


def test_an_empty_list_of_roots_is_refused(authority: Authority, live: LiveServerCredentials) -> None:
    with pytest.raises(ValueError, match="at least one"):
        live.update([], authority.issue_server())


def test_a_call_without_a_certificate_has_no_peer() -> None:
    with pytest.raises(Forbidden, match="without a client certificate"):
        peer_fingerprint({"transport_security_type": [b"ssl"]})


async def test_a_session_ticket_does_not_outlive_the_trust_in_its_owner(
    authority: Authority, live: LiveServerCredentials, serve: Any, tmp_path: Path
) -> None:
    bootstrap = JoinToken.new(authority.public_key_compressed).bootstrap()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=authority.certificate_pem.decode())
    context.load_cert_chain(bootstrap.save(tmp_path))
    context.set_alpn_protocols(["h2"])

    def connect(port: int, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=server_name(authority.certificate_pem), session=session) as secure,
        ):
            return secure.recv(1), secure.session

    server = authority.issue_server()
    async with serve(live) as served:
        live.update([authority.certificate_pem, bootstrap.certificate_pem], server)
        first, session = await asyncio.to_thread(connect, served.port, None)
        assert first and session and session.has_ticket
        live.update([authority.certificate_pem], server)
        try:
            let_in, _ = await asyncio.to_thread(connect, served.port, session)
        except (ssl.SSLError, ConnectionError):
            let_in = b""
        assert let_in == b""
