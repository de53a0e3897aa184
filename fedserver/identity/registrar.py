"""Who may come in: join tokens, certificates for devices, and the trust roots of the next handshake."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from attune.common.errors import CertificateRefused, Forbidden, NameTaken, TokenRefused
from attune.common.identity.credential import fingerprint_of, key_fingerprint_of, needs_renewal, not_after
from attune.common.identity.names import check_name
from attune.common.identity.token import JoinToken
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials
from attune.fedserver.stores.sqlite import Store

KEEP_SPENT_S = 7 * 86400.0  # for this time a spent token passes the handshake, only to hear why it is refused
LOCAL_USES = 1_000_000
OPERATOR = "operator"
LOCAL_TTL_S = 365 * 86400.0


def new_token(
    authority_public_key: bytes, store: Store, uses: int, ttl_s: float, *, origin: str = "operator", keep: int | None = None
) -> str:
    """A join token, admitted in the store; of its origin only the newest `keep` stay. A running server must be woken."""
    token = JoinToken.new(authority_public_key)
    pem = token.bootstrap().certificate_pem
    store.add_token(fingerprint_of(pem), pem, uses, time.time() + ttl_s, origin, keep)
    return token.encode()


class Registrar:
    """Issues certificates and decides by fingerprint. Every decision is read from the store, so a command can change it."""

    def __init__(self, authority: Authority, store: Store, certificate_days: float) -> None:
        self.authority = authority
        self._store = store
        self._days = certificate_days
        self._server = authority.issue_server()
        self.tls = LiveServerCredentials(self._roots(), self._server)

    def _roots(self) -> list[bytes]:
        return [self.authority.certificate_pem, *self._store.bootstrap_roots(time.time(), KEEP_SPENT_S)]

    def refresh(self) -> None:
        """New tokens in, old ones out, and a fresh server certificate when two thirds of the old one's life are gone."""
        if needs_renewal(self._server.certificate_pem, datetime.now(UTC)):
            self._server = self.authority.issue_server()
        self.tls.update(self._roots(), self._server)

    def role(self, fingerprint: str) -> tuple[str, str]:
        """(role, name) of a caller: operator, device or bootstrap. Errors: CertificateRefused, Forbidden."""
        row = self._store.certificate(fingerprint)
        if row is None:
            if self._store.token(fingerprint) is not None:
                return "bootstrap", ""
            raise Forbidden("this certificate was not issued to a device of this federation: enrol with a join token")
        if row["revoked"]:
            raise CertificateRefused(f"the certificate of {row['name']} was revoked by the operator of this federation")
        if row["not_after"] < time.time():
            raise CertificateRefused(f"the certificate of {row['name']} has expired: start the device with a new --token")
        return str(row["role"]), str(row["name"])

    def enrol(self, bootstrap_fingerprint: str, name: str, csr_der: bytes) -> bytes:
        """A device's first certificate (PEM). Asking again with the same key and name costs no further use of the token.

        Errors: TokenRefused, NameTaken, SettingError for an impossible name, RequestRefused.
        """
        check_name(name)
        known = self._store.device(name)
        pem = self.authority.issue_device(csr_der, name, self._days)
        key = key_fingerprint_of(pem)
        if known is not None and known.revoked:
            raise CertificateRefused(f"the operator has revoked {name}: enrol under another --name")
        if known is not None and known.public_key != key:
            raise NameTaken(f"another device already holds the name {name}: choose one with --name")
        with self._store.transaction():
            if known is None:
                self._spend(bootstrap_fingerprint)
                self._store.add_device(name, key)
            self._store.add_certificate(fingerprint_of(pem), name, "device", not_after(pem).timestamp())
        return pem

    def renew(self, name: str, csr_der: bytes) -> bytes:
        """A fresh certificate (PEM) for a device that called with its present one."""
        pem = self.authority.issue_device(csr_der, name, self._days)
        with self._store.transaction():
            self._store.add_device(name, key_fingerprint_of(pem))
            self._store.add_certificate(fingerprint_of(pem), name, "device", not_after(pem).timestamp())
        return pem

    def _spend(self, bootstrap_fingerprint: str) -> None:
        token = self._store.token(bootstrap_fingerprint)
        if token is None:
            raise TokenRefused("the server does not know this join token: ask its operator for one (`fedserver token`)")
        if token["expires_at"] < time.time():
            raise TokenRefused("this join token has expired: ask the server's operator for a new one (`fedserver token`)")
        if token["uses_left"] <= 0:
            raise TokenRefused(
                "this join token is used up: ask the server's operator for a new one (`fedserver token --uses N`)"
            )
        self._store.use_token(bootstrap_fingerprint)


def install_operator(authority: Authority, store: Store, folder: Path) -> None:
    """A fresh credential in `folder`, with which the commands of this home may call the server; older ones end."""
    credential = authority.issue_operator()
    credential.save(folder, OPERATOR)
    pem = credential.certificate_pem
    store.replace_operator(fingerprint_of(pem), not_after(pem).timestamp())
