"""Signed statements of secure aggregation: whose the keys of an attempt are, and which devices' updates are summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import SecureMember
from attune.common.identity.certificates import CLOCK_ALLOWANCE, Lifetime
from attune.common.identity.credential import Credential, load_certificate, load_key
from attune.common.protocol import MOST_MEMBERS

CERTIFICATE_BYTES = 4096  # longest certificate of a member
SIGNATURE_BYTES = 80  # longest ECDSA signature on P-256, as DER
_KEPT = 2 * MOST_MEMBERS  # certificates whose checks are kept: a device shows the same one in many rounds


@dataclass(frozen=True)
class Occasion:
    """The attempt that keys, masks and signatures are for. Those of another one do not fit."""

    federation: str
    run: str
    round: int
    attempt: int

    @property
    def context(self) -> bytes:
        """The same as bytes."""
        return msgspec.json.encode([self.federation, self.run, self.round, self.attempt])


def keys_statement(occasion: Occasion, member: SecureMember) -> bytes:
    """Return what a device signs about its keys."""
    return b"keys\n" + msgspec.json.encode([member.name, member.mask_key, member.share_key]) + b"\n" + occasion.context


def survivors_statement(occasion: Occasion, names: list[str]) -> bytes:
    """Return what a device signs about the devices whose updates are summed."""
    return b"survivors\n" + msgspec.json.encode(sorted(names)) + b"\n" + occasion.context


def signed(statement: bytes, credential: Credential) -> bytes:
    """Return the signature by a device's key."""
    return load_key(credential.key_pem).sign(statement, ec.ECDSA(SHA256()))


def certificate_der(credential: Credential) -> bytes:
    """Return a device's certificate as it is sent."""
    return load_certificate(credential.certificate_pem).public_bytes(Encoding.DER)


def holder_of(member: SecureMember) -> ec.EllipticCurvePublicKey:
    """Return the key of a member's certificate, which must be in the member's name.

    Raises:
        UpdateRefused: The certificate cannot be read, has another name, or another kind of key.
    """
    try:
        names, key = _names_and_key(member.certificate[:CERTIFICATE_BYTES])
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise UpdateRefused(f"the certificate of {member.name} in the cohort's list cannot be read") from None
    if names != (member.name,) or not isinstance(key, ec.EllipticCurvePublicKey):
        raise UpdateRefused(f"the certificate of {member.name} in the cohort's list is of another name or kind")
    return key


@lru_cache(_KEPT)
def _names_and_key(certificate_der: bytes) -> tuple[tuple[str, ...], CertificatePublicKeyTypes]:
    certificate = x509.load_der_x509_certificate(certificate_der)
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return tuple(str(name.value) for name in names), certificate.public_key()


@lru_cache(_KEPT)
def _lifetime(certificate_der: bytes, authority_pem: bytes) -> Lifetime:
    """Return when a certificate is valid that this authority has issued."""
    certificate = x509.load_der_x509_certificate(certificate_der)
    certificate.verify_directly_issued_by(load_certificate(authority_pem))
    return Lifetime(certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def check_signed(member: SecureMember, signature: bytes, statement: bytes) -> ec.EllipticCurvePublicKey:
    """Check a member's signature against its certificate, and return the certificate's key.

    Raises:
        UpdateRefused: It does not fit, or as `holder_of`.
    """
    key = holder_of(member)
    try:
        key.verify(signature[:SIGNATURE_BYTES], statement, ec.ECDSA(SHA256()))
    except InvalidSignature:
        raise UpdateRefused(f"the signature of {member.name} in the cohort's list is not of its certificate") from None
    return key


def lifetime_of(member: SecureMember, authority_pem: bytes) -> Lifetime:
    """Return when a member's certificate is valid, which the authority must have issued.

    Raises:
        UpdateRefused: Another one has.
    """
    try:
        return _lifetime(member.certificate, authority_pem)
    except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
        raise UpdateRefused(
            f"the certificate of {member.name} in the cohort's list is not of this device's authority (--authority)"
        ) from None


def check_lifetimes(lifetimes: Mapping[str, Lifetime]) -> None:
    """Check that the certificates of a cohort are valid, by this device's clock and by each other.

    A clock that went back makes no expired certificate good: since the newest one began, at least so much time has passed.

    Args:
        lifetimes: That of each member's certificate, by name; not empty.

    Raises:
        UpdateRefused: One has expired, or the clock is wrong.
    """
    now, newest = datetime.now(timezone.utc), max(lifetimes, key=lambda name: lifetimes[name].not_before)
    begins = lifetimes[newest].not_before
    if begins > now + CLOCK_ALLOWANCE:
        raise UpdateRefused(
            f"the certificate of {newest} in the cohort's list is valid from {begins:%Y-%m-%d %H:%M} UTC on, but it is "
            f"{now:%Y-%m-%d %H:%M} here: set this device's clock, or the server's"
        )
    for name, life in lifetimes.items():
        if life.not_after < max(now, begins):
            since = f"it is {now:%Y-%m-%d %H:%M} here" if life.not_after < now else f"that of {newest} began later"
            raise UpdateRefused(
                f"the certificate of {name} in the cohort's list has expired on {life.not_after:%Y-%m-%d %H:%M} UTC ({since})"
            )
