"""Who may come in: join tokens, certificates for devices, and the trust roots of the next handshake."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from attune.common.errors import CertificateRefused, Forbidden, NameTaken, TokenRefused
from attune.common.faults import SERVER, fail_at
from attune.common.identity.credential import fingerprint_of, key_fingerprint_of, needs_renewal, not_after
from attune.common.identity.names import check_name
from attune.common.identity.token import JoinToken
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials
from attune.fedserver.ports.ledger import Certificate, Ledger, Token

KEEP_SPENT_S = 7 * 86400.0  # for this time a spent token passes the handshake, only to hear why it is refused
LOCAL_USES = 1_000_000
OPERATOR = "operator"
LOCAL_TTL_S = 365 * 86400.0


async def new_token(
    authority_public_key: bytes, ledger: Ledger, uses: int, ttl_s: float, *, origin: str = "operator", keep: int | None = None
) -> str:
    """A join token, admitted in the ledger; of its origin only the newest `keep` stay. A running server must be woken."""
    token = JoinToken.new(authority_public_key)
    pem = token.bootstrap().certificate_pem
    await ledger.add_token(Token(fingerprint_of(pem), pem, uses, time.time() + ttl_s, origin), keep)
    return token.encode()


@dataclass(frozen=True)
class Caller:
    """Who called. name: empty for the holder of a token."""

    role: str  # operator, device or bootstrap
    name: str
    fingerprint: str  # of its certificate
    not_after: float = float("inf")  # unix time at which it expires

    def check_time(self) -> None:
        """Errors: CertificateRefused once the certificate has expired."""
        if self.not_after < time.time():
            raise CertificateRefused(f"the certificate of {self.name} has expired: start the device with a new --token")


class Registrar:
    """Issues certificates and decides by fingerprint. Every decision is read from the ledger, so a command can change it."""

    def __init__(self, authority: Authority, ledger: Ledger, certificate_days: float) -> None:
        self.authority = authority
        self._ledger = ledger
        self._days = certificate_days
        self._turn = asyncio.Lock()
        self._server = authority.issue_server()
        self.tls = LiveServerCredentials([authority.certificate_pem], self._server)  # until `refresh` lets tokens in

    async def refresh(self) -> None:
        """New tokens in, old ones out, and a fresh server certificate when two thirds of the old one's life are gone."""
        if needs_renewal(self._server.certificate_pem, datetime.now(UTC)):
            self._server = self.authority.issue_server()
        roots = await self._ledger.bootstrap_roots(time.time(), KEEP_SPENT_S)
        self.tls.update([self.authority.certificate_pem, *roots], self._server)

    async def caller(self, fingerprint: str) -> Caller:
        """Whose certificate this is. Errors: CertificateRefused, Forbidden."""
        found = await self._ledger.certificate(fingerprint)
        if found is None:
            if await self._ledger.token(fingerprint) is not None:
                return Caller("bootstrap", "", fingerprint)
            raise Forbidden("this certificate was not issued to a device of this federation: enrol with a join token")
        if found.revoked:
            raise CertificateRefused(f"the certificate of {found.name} was revoked by the operator of this federation")
        caller = Caller(found.role, found.name, fingerprint, found.not_after)
        caller.check_time()
        return caller

    async def enrol(self, bootstrap_fingerprint: str, name: str, csr_der: bytes) -> bytes:
        """A device's first certificate (PEM). Asking again with the same key and name costs no further use of the token.

        Errors: TokenRefused, NameTaken, SettingError for an impossible name, RequestRefused.
        """
        check_name(name)
        pem = self.authority.issue_device(csr_der, name, self._days)
        key = key_fingerprint_of(pem)
        async with self._turn:  # of two devices that ask for one name at once, or for a token's last use, one is first
            known = await self._ledger.device(name)
            if known is not None and known.revoked:
                raise CertificateRefused(f"the operator has revoked {name}: enrol under another --name")
            if known is not None and known.public_key != key:
                raise NameTaken(f"another device already holds the name {name}: choose one with --name")
            if any(device.revoked and device.public_key == key for device in await self._ledger.devices()):
                raise CertificateRefused(
                    "the operator has revoked the device with this key: it cannot enrol under another name"
                )
            if known is None:
                await self._check_token(bootstrap_fingerprint)
            await self._ledger.enrol(
                name, key, _certificate(pem, name), time.time(), bootstrap_fingerprint if known is None else None
            )
        fail_at(SERVER, 0, "certificate-issued")
        return pem

    async def renew(self, name: str, csr_der: bytes) -> bytes:
        """A fresh certificate (PEM) for a device that called with its present one."""
        pem = self.authority.issue_device(csr_der, name, self._days)
        await self._ledger.enrol(name, key_fingerprint_of(pem), _certificate(pem, name), time.time())
        return pem

    async def _check_token(self, bootstrap_fingerprint: str) -> None:
        token = await self._ledger.token(bootstrap_fingerprint)
        if token is None:
            raise TokenRefused("the server does not know this join token: ask its operator for one (`fedserver token`)")
        if token.expires_at < time.time():
            raise TokenRefused("this join token has expired: ask the server's operator for a new one (`fedserver token`)")
        if token.uses_left <= 0:
            raise TokenRefused(
                "this join token is used up: ask the server's operator for a new one (`fedserver token --uses N`)"
            )


def _certificate(pem: bytes, name: str) -> Certificate:
    return Certificate(fingerprint_of(pem), name, "device", not_after(pem).timestamp())


async def install_operator(authority: Authority, ledger: Ledger, folder: Path) -> None:
    """A fresh credential in `folder`, with which the commands of this home may call the server; older ones end."""
    credential = authority.issue_operator()
    credential.save(folder, OPERATOR)
    pem = credential.certificate_pem
    await ledger.replace_operator(Certificate(fingerprint_of(pem), OPERATOR, "operator", not_after(pem).timestamp()))
