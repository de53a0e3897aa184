"""Enrolment: a join token becomes a certificate for a key that never leaves this device. The gRPC channel of a device.

The channel notes what is sent, and its calls all end with one reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, TypeVar

import grpc
import msgspec
from grpc.aio import AioRpcError

from attune.common import aio
from attune.common.errors import AttuneError, CertificateRefused, FingerprintMismatch, Forbidden, Unreachable
from attune.common.exchange.messages import EnrolRequest, IssuedCertificate
from attune.common.exchange.protobuf import ENROL, Call
from attune.common.faults import fail_at
from attune.common.grpc_errors import from_rpc
from attune.common.identity.certificates import CLOCK_ALLOWANCE
from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import (
    Credential,
    check_common_name,
    csr_der,
    is_valid_at,
    load_certificate,
    load_or_new_key,
    neutral_name,
)
from attune.common.identity.names import check_name
from attune.common.identity.token import JoinToken
from attune.common.text import clean
from attune.fedclient.address import ServerAddress, backoff_s
from attune.fedclient.disclosure_log import DisclosureLog
from attune.fedclient.gate import with_rows
from attune.fedclient.home import DeviceHome, DeviceInfo, Identity
from attune.fedclient.link.diagnose import diagnose
from attune.fedclient.link.port import Broken

C = TypeVar("C")


class GrpcChannel:
    """gRPC channel that can end all its calls with a reason, and notes what is sent.

    Args:
        channel: The channel. It gets messages as bytes alone, so none can be sent that was not noted.
        judged: Turns a server's refusal into an error.
        log: Notes what is sent.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        judged: Callable[[AioRpcError], Exception | None] = from_rpc,
        log: DisclosureLog | None = None,
    ) -> None:
        self.channel = channel
        self._judged, self._log = judged, log
        self._cut_by = ""
        self._calls: set[Any] = set()

    def unary(self, call: Call) -> Any:
        """Return what makes a call with one request and one reply."""
        made = self.channel.unary_unary(call.path, None, call.reply.read)
        return lambda message, timeout: made(self.written(call, message), timeout=timeout)

    def receiving(self, call: Call) -> Any:
        """Return what makes a call whose replies are a stream."""
        made = self.channel.unary_stream(call.path, None, call.reply.read)
        return lambda message: made(self.written(call, message))

    def sending(self, call: Call) -> Any:
        """Return what makes a call whose requests are a stream of bytes."""
        return self.channel.stream_unary(call.path, None, call.reply.read)

    def streams(self, call: Call) -> Any:
        """Return what makes a call with streams both ways. Its requests are bytes, as `written` returns them."""
        return self.channel.stream_stream(call.path, None, call.reply.read)

    def written(self, call: Call, message: Any) -> bytes:
        """Note a message, and return its bytes.

        Raises:
            OSError: It cannot be noted, so it must not be sent.
        """
        data = call.request.write(message := with_rows(message))
        if self._log is not None:
            self._log.note(message, len(data))
        return data

    @contextlib.contextmanager
    def call(self, call: C) -> Iterator[C]:
        """Track a call during the block, which ends it in any case.

        Failures become AttuneErrors (what the peer named) or Broken (all others). A task that is being cancelled gets only
        CancelledError, because a link breaks and its job is cancelled in the same moment.
        """
        self._calls.add(call)
        try:
            yield call
        except (AioRpcError, TimeoutError, asyncio.CancelledError) as error:
            if aio.cancelling():
                raise asyncio.CancelledError from None
            raise self._named(error) from None
        finally:
            self._calls.discard(call)
            call.cancel()  # type: ignore[attr-defined]

    def _named(self, error: BaseException) -> Exception:
        if isinstance(error, AioRpcError):
            named = self._judged(error)
            if named is not None and not isinstance(named, Unreachable):
                return named
            unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
            return Broken(f"lost the server ({error.code().name.lower()}: {clean(error.details() or '')})", unavailable)
        if isinstance(error, TimeoutError):
            return Broken("the server has stopped answering")
        # The call was cancelled, not this task: the channel was closed.
        return Broken(self._cut_by or "the connection was given up")

    async def cut(self, reason: str) -> None:
        """End all calls, which raise Broken with this reason, and the connection."""
        self._cut_by = reason
        for call in list(self._calls):
            call.cancel()
        await self.channel.close()


CALL_S = 30.0
DIAGNOSIS_S = 5.0
HEALTH = "/grpc.health.v1.Health/Check"


async def enrol(
    home: DeviceHome,
    record: DeviceInfo,
    address: ServerAddress,
    token_text: str,
    connect_timeout_s: float,
    say: Callable[[str], None],
) -> Identity:
    """Ask the server for a certificate in `record.name`, or else in a neutral name, and keep it in `home`.

    The key is kept before it is used. If the answer is lost, the same key asks again and gets a fresh certificate.

    Raises:
        TokenRefused, FingerprintMismatch, NameTaken: At once.
        Unreachable: No server answered within `connect_timeout_s`.
    """
    key_path = home.identity_folder / "key.pem"
    key = load_or_new_key(key_path)
    record = msgspec.structs.replace(record, name=record.name or neutral_name(key))
    fail_at(record.name, 0, "key-written")
    identity = await _certify(home, record, key, address, token_text, connect_timeout_s, say)
    key_path.unlink(missing_ok=True)
    return identity


async def stay_enrolled(
    home: DeviceHome,
    identity: Identity,
    address: ServerAddress,
    token_text: str | None,
    connect_timeout_s: float,
    say: Callable[[str], None],
) -> Identity:
    """Return the identity. By the token, get a fresh certificate for its name and key where the present one does not count.

    That is so if it is out of date and the server does not accept it, or if the server does not know it: a power cut or an
    older backup may lose an enrolment. Without a token the connection shows whether it counts.

    Raises:
        AttuneError: As in `enrol`.
    """
    if token_text is None:
        return identity
    dated = is_valid_at(identity.credential.certificate_pem, datetime.now(timezone.utc))
    refusal = await refusal_of(identity, address)
    unknown = isinstance(refusal, Forbidden)
    if refusal is None or (dated and not unknown):
        say(f"already enrolled as {identity.name}; the token is ignored")
        return identity
    why = "is unknown to the server, which has lost the enrolment" if unknown else "is out of date"
    say(f"the certificate of {identity.name} {why}; enrolling again with the same key")
    record = home.record() or DeviceInfo(identity.name, str(address))
    return await _certify(home, record, identity.credential.key_pem, address, token_text, connect_timeout_s, say)


async def refusal_of(identity: Identity, address: ServerAddress) -> AttuneError | None:
    """Return why the server refuses the certificate, by a call that changes nothing; None if it accepts the certificate.

    Unreachable: it does not say.
    """
    anchor = identity.ca_pem
    async with grpc.aio.secure_channel(
        address.target, channel_credentials(anchor, identity.credential), channel_options(anchor, address.proxy_url)
    ) as channel:
        try:
            ask: Any = channel.unary_unary(HEALTH)
            await ask(b"", timeout=DIAGNOSIS_S)
        except AioRpcError as error:
            return from_rpc(error) or Unreachable(f"{address} does not answer ({error.code().name.lower()})")
    return None


async def _certify(
    home: DeviceHome,
    record: DeviceInfo,
    key: bytes,
    address: ServerAddress,
    token_text: str,
    connect_timeout_s: float,
    say: Callable[[str], None],
) -> Identity:
    """Get a certificate for `key`, check it and keep it."""
    token = JoinToken.parse(token_text)
    request = EnrolRequest(check_name(record.name), csr_der(key, record.name))
    answer = await _ask(address, token, request, connect_timeout_s, say, DisclosureLog(home.path))
    credential = Credential(key, answer.certificate_pem)
    token.check_authority(answer.ca_pem)
    check_issued(credential, answer.ca_pem, record.name)
    check_usable(answer.certificate_pem, datetime.now(timezone.utc))
    identity = Identity(record.name, credential, answer.ca_pem)
    home.remember(DeviceInfo(identity.name, record.server, record.data))
    home.keep(identity)
    fail_at(identity.name, 0, "certificate-kept")
    return identity


async def _ask(
    address: ServerAddress,
    token: JoinToken,
    request: EnrolRequest,
    connect_timeout_s: float,
    say: Callable[[str], None],
    log: DisclosureLog,
) -> IssuedCertificate:
    anchor, bootstrap = token.trust_anchor_pem(), token.bootstrap()
    started, failures, data = time.monotonic(), 0, ENROL.request.write(request)
    while True:
        log.note(request, len(data))
        # A new channel for every try: an old one would wait by gRPC's own back-off.
        async with grpc.aio.secure_channel(
            address.target, channel_credentials(anchor, bootstrap), channel_options(anchor, address.proxy_url)
        ) as channel:
            try:
                ask: Any = channel.unary_unary(ENROL.path, None, ENROL.reply.read)
                answer: IssuedCertificate = await ask(data, timeout=CALL_S)
                return answer
            except AioRpcError as error:
                named = from_rpc(error)
        if named is not None and not isinstance(named, Unreachable):
            raise named
        reason = await asyncio.to_thread(
            diagnose, address.host, address.port, anchor, bootstrap, DIAGNOSIS_S, bootstrap=True, proxy=address.way
        )
        if not isinstance(reason, Unreachable):
            raise reason
        failures, address = failures + 1, address.next
        left_s = connect_timeout_s - (time.monotonic() - started)
        if left_s <= 0:
            raise Unreachable(f"{reason} (gave up after {connect_timeout_s:g} s)")
        if failures == 1:
            say(f"{reason} (trying again for {connect_timeout_s:g} s)")
        await asyncio.sleep(min(left_s, backoff_s(failures) * random.uniform(0.5, 1.0)))  # noqa: S311 (jitter)


def check_usable(certificate_pem: bytes, now: datetime) -> None:
    """Check that a new certificate is valid about now. A server whose clock is wrong issues others, which must not be kept.

    Raises:
        Unreachable: It is not; a later one will be.
    """
    certificate = load_certificate(certificate_pem)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if first - CLOCK_ALLOWANCE > now or now > last:
        raise Unreachable(
            f"the server issued a certificate that is valid from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC, but it "
            f"is {now:%Y-%m-%d %H:%M} here, so it was not kept. Set the server's clock, or this device's, and start again"
        )


def check_issued(credential: Credential, ca_pem: bytes, name: str) -> None:
    """Check that the certificate has this device's name and key, and that the trusted authority issued it.

    Raises:
        CertificateRefused: It has another name or key.
        FingerprintMismatch: Another authority issued it.
    """
    check_common_name(credential.certificate_pem, name)
    if not credential.fits():
        raise CertificateRefused("the server sent a certificate that is not for this device's key; ask the operator why")
    if not credential.issued_by(ca_pem):
        raise FingerprintMismatch(
            "the server sent a certificate that its own authority did not sign; do not trust it, ask the operator"
        )
