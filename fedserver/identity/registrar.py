"""Join tokens, certificates of devices, and the trust roots of the next handshake."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from attune.common.errors import CertificateRefused, Forbidden, NameTaken, TokenRefused, TooMany
from attune.common.faults import SERVER, fail_at
from attune.common.identity.credential import (
    fingerprint_of,
    key_fingerprint_of,
    not_after,
)
from attune.common.identity.names import check_name
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.identity.admin import DAY_S, state_of
from attune.fedserver.identity.authority import SERVER_DAYS, Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials
from attune.fedserver.ports.ledger import Certificate, MemberLedger, Token

KEEP_SPENT_S = 7 * 86400.0  # for this time a spent token passes the handshake, only to hear why it is refused
LOCAL_USES = 1_000_000
OPERATOR = "operator"
LOCAL_TTL_S = 365 * 86400.0
LONGEST_GRACE_S = 30.0  # from the first call under a renewed certificate to the end of the one before
ISSUED, ISSUED_WITHIN_S = 8, 3600.0  # certificates that a device is issued at most, in this time or a fifth of their life
UNUSED = ISSUED  # certificates of a device that are kept until their first call; no fewer, for ISSUED counts them
FORGET_S = 86400.0  # for this time a retired certificate hears that it is retired
UNKNOWN = (
    "this certificate was not issued to a device of this federation, or the server has lost the enrolment: keep the home, ask "
    "the server's operator for a token for this device (`fedserver token --for NAME`) and start it with --token-file"
)
NAME_KEPT = 43  # characters of a name of 64 that are left beside `.revoked-` and twelve digits
RELEASED = "name of a revoked device given to another"
RETRY_S = 3600.0  # for this time a device that has not heard the answer may ask for its first certificate again


@dataclass(frozen=True)
class Caller:
    """The caller of a request.

    Attributes:
        role: operator, device or bootstrap.
        name: The device or operator; empty for the holder of a token.
        fingerprint: Fingerprint of its certificate.
        not_after: Unix time at which that expires.
        retired: Certificates that end before their date, and when (unix times).
    """

    role: str  # operator, device or bootstrap
    name: str
    fingerprint: str
    not_after: float = float("inf")
    retired: Mapping[str, float] = field(default_factory=dict, repr=False)

    @property
    def left_s(self) -> float:
        """Seconds until the certificate expires, or until a newer one stands for it."""
        return min(self.not_after, self.retired.get(self.fingerprint, self.not_after)) - time.time()

    def check_time(self) -> None:
        """Check that the certificate is still valid.

        Raises:
            CertificateRefused: It has expired, or a newer one stands for it.
        """
        now = time.time()
        if self.not_after < now:
            raise CertificateRefused(
                f"the certificate of {self.name} has expired: ask the server's operator for a token for this device "
                f"(`fedserver token --for {self.name}`) and start it with --token-file"
            )
        if self.retired.get(self.fingerprint, self.not_after) < now:
            raise CertificateRefused(f"{self.name} has a newer certificate than this one: go on with that")


class Registrar:
    """Issuer of certificates. It reads each decision from the ledger, by fingerprint, because a command can change it."""

    def __init__(self, authority: Authority, ledger: MemberLedger, certificate_days: float) -> None:
        self.authority = authority
        self._ledger = ledger
        self._days = certificate_days
        self._turn = asyncio.Lock()
        self._retired: dict[str, float] = {}
        self._server = authority.issue_server()
        self.tls = LiveServerCredentials([authority.certificate_pem], self._server)  # until `refresh` lets tokens in

    async def refresh(self) -> None:
        """Admit new tokens, drop old ones, and renew the server's certificate when a third of its days is left.

        One with more days than a new one was made while this machine's clock was wrong.
        """
        left_days = (not_after(self._server.certificate_pem) - datetime.now(timezone.utc)) / timedelta(days=1)
        if not SERVER_DAYS / 3 < left_days <= SERVER_DAYS:
            self._server = self.authority.issue_server()
        roots = await self._ledger.bootstrap_roots(time.time(), KEEP_SPENT_S)
        self.tls.update([self.authority.certificate_pem, *roots], self._server)

    async def caller(self, fingerprint: str) -> Caller:
        """Return the caller that has this certificate.

        Raises:
            CertificateRefused: The certificate has expired, is retired, or its device is revoked.
            Forbidden: The certificate was not issued here.
        """
        certificate = await self._ledger.certificate(fingerprint)
        if certificate is None:
            if await self._ledger.token(fingerprint) is not None:
                return Caller("bootstrap", "", fingerprint)
            raise Forbidden(UNKNOWN)
        if certificate.revoked:
            raise CertificateRefused(f"the certificate of {certificate.name} was revoked by the operator of this federation")
        if certificate.retires_at is not None:
            self._retired.setdefault(fingerprint, certificate.retires_at)
        caller = Caller(certificate.role, certificate.name, fingerprint, certificate.not_after, self._retired)
        caller.check_time()
        if certificate.role == "device" and certificate.used_at is None:
            await self._first_use(fingerprint)
        return caller

    async def _first_use(self, fingerprint: str) -> None:
        """Make this the device's certificate. The one before ends after a grace, for calls under way."""
        now = time.time()
        until = now + min(LONGEST_GRACE_S, self._days * DAY_S / 6)
        for retired in await self._ledger.first_use(fingerprint, now, until):
            self._retired[retired] = until
        for forgotten in [old for old, end in self._retired.items() if end < now - FORGET_S]:
            del self._retired[forgotten]

    async def enrol(self, bootstrap_fingerprint: str, name: str, csr_der: bytes) -> bytes:
        """Issue a device's first certificate (PEM), or a fresh one where it ran out; each costs a use of the token.

        A device that was enrolled with this token and has never called since has not heard the answer: it costs no further use.

        Raises:
            TokenRefused: The token is unknown, over, or for another device.
            NameTaken: Another device has the name.
            CertificateRefused: The operator has revoked the device, and the token is not for its name; or it was this key.
            SettingError: The name cannot be.
            RequestRefused: The request is none.
            TooMany: The device was issued too many certificates.
        """
        check_name(name)
        if await self._ledger.device(name) is None:  # nothing is signed for a token that is over
            _check_live(await self._token(bootstrap_fingerprint, name))
        pem = self.authority.issue_device(csr_der, name, self._days)
        key = key_fingerprint_of(pem)
        async with self._turn:  # of two devices that ask for one name at once, or for a token's last use, one is first
            known = await self._ledger.device(name)
            if known is not None and known.revoked and (await self._token(bootstrap_fingerprint, name)).only_for != name:
                raise CertificateRefused(
                    f"the operator has revoked {name}: enrol under another --name, or with a token for this one "
                    f"(`fedserver token --for {name}`)"
                )
            if known is not None and not known.revoked and known.public_key != key:
                raise NameTaken(f"another device already holds the name {name}: choose one with --name")
            if await self._ledger.is_revoked_key(key):
                raise CertificateRefused(
                    "the operator has revoked the device with this key: it cannot enrol under another name"
                )
            token = await self._token(bootstrap_fingerprint, name)
            if known is not None and known.revoked:
                _check_live(token)
                await self._release(known)
                known = None
            again = known is not None and await self._unanswered(known, token)
            if not again:
                _check_live(token)
            await self._check_often(name)
            certificate, now = self._certificate(pem, name), time.time()
            await self._ledger.note("enrolled", "device", name=name, token=token.id, **_facts(certificate))
            await self._ledger.enrol(name, key, certificate, now, None if again else bootstrap_fingerprint)
        fail_at(SERVER, 0, "certificate-issued")
        return pem

    async def renew(self, name: str, csr_der: bytes) -> bytes:
        """Issue a fresh certificate (PEM) to a device that called with its present one. It counts from its first call on.

        Raises:
            RequestRefused: The request is none.
            TooMany: The device was issued too many certificates.
        """
        pem = self.authority.issue_device(csr_der, name, self._days)
        async with self._turn:
            await self._check_often(name)
            certificate = self._certificate(pem, name)
            await self._ledger.note("renewed", "device", name=name, **_facts(certificate))
            await self._ledger.renew(certificate, time.time(), UNUSED, FORGET_S)
        return pem

    async def _release(self, revoked: DeviceRecord) -> None:
        """Free the name of a revoked device for another one. The revoked device keeps its key and is refused as before."""
        other = f"{revoked.name[:NAME_KEPT]}.revoked-{revoked.public_key[:12]}"
        await self._ledger.note(RELEASED, "device", name=revoked.name, revoked_as=other, key=revoked.public_key)
        await self._ledger.release(revoked.name, other)

    async def _unanswered(self, known: DeviceRecord, token: Token) -> bool:
        """Return whether this device was enrolled with this token a moment ago, and has shown no certificate since."""
        if (
            not token.id
            or known.token != token.id
            or token.withdrawn_at is not None
            or known.enrolled_at < time.time() - RETRY_S
        ):
            return False
        return all(certificate.used_at is None for certificate in await self._ledger.certificates(known.name))

    async def _check_often(self, name: str) -> None:
        """Check that the device was not issued too many certificates.

        Raises:
            TooMany: It was.
        """
        span_s = min(ISSUED_WITHIN_S, self._days * DAY_S / 5)
        now = time.time()  # certificates of a later time were issued while this machine's clock was wrong
        if sum(now - span_s < one.issued_at <= now for one in await self._ledger.certificates(name)) >= ISSUED:
            raise TooMany(f"{name} was issued {ISSUED} certificates within {span_s:.0f} s: go on with the newest, or wait")

    async def _token(self, bootstrap_fingerprint: str, name: str) -> Token:
        """Return the token with this fingerprint.

        Raises:
            TokenRefused: It is unknown, or for another device.
        """
        token = await self._ledger.token(bootstrap_fingerprint)
        if token is None:
            raise TokenRefused("the server does not know this join token: ask its operator for one (`fedserver token`)")
        if token.only_for not in ("", name):
            raise TokenRefused(
                f"this join token is for the device {token.only_for} alone: ask the server's operator for another"
            )
        return token

    def _certificate(self, pem: bytes, name: str) -> Certificate:
        ends = not_after(pem).timestamp()
        return Certificate(fingerprint_of(pem), name, "device", ends, public_key=key_fingerprint_of(pem), issued_at=time.time())


def _facts(certificate: Certificate) -> dict[str, Any]:
    """Return what the audit log says of a certificate: enough to make its row in the ledger again."""
    return {"certificate": certificate.fingerprint, "key": certificate.public_key, "not_after": certificate.not_after}


def _check_live(token: Token) -> None:
    """Check that a token admits a device.

    Raises:
        TokenRefused: It is expired, used up or withdrawn.
    """
    again = "ask the server's operator for a new one (`fedserver token`)"
    match state_of(token, time.time()):
        case "expired":
            raise TokenRefused(f"this join token has expired: {again}")
        case "used up":
            raise TokenRefused(f"this join token is used up: {again}")
        case "withdrawn":
            raise TokenRefused(f"the operator has withdrawn this join token: {again}")


async def install_operator(authority: Authority, ledger: MemberLedger, folder: Path) -> None:
    """Write a fresh credential into `folder`, with which the commands of this home call the server; older ones end."""
    credential = authority.issue_operator()
    credential.save(folder, OPERATOR)
    pem = credential.certificate_pem
    await ledger.replace_operator(Certificate(fingerprint_of(pem), OPERATOR, "operator", not_after(pem).timestamp()))
