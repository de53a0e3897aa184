"""Signed statements of secure aggregation: whose the keys of an attempt are, and which devices' updates are summed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property, lru_cache

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
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
_SIGNATURE = ec.ECDSA(SHA256())
_KEPT = 2 * MOST_MEMBERS  # certificates whose checks are kept: a device shows the same one in many rounds


@dataclass(frozen=True)
class Occasion:
    """The attempt that keys, masks and signatures are for. Those of another one do not fit."""

    federation: str
    run: str
    round: int
    attempt: int

    @cached_property
    def context(self) -> bytes:
        """The same as bytes."""
        return msgspec.json.encode([self.federation, self.run, self.round, self.attempt])


def keys_statement(occasion: Occasion, member: SecureMember) -> bytes:
    """Return what a device signs about its keys."""
    return b"keys\n" + msgspec.json.encode([member.name, member.mask_key, member.share_key]) + b"\n" + occasion.context


def survivors_statement(occasion: Occasion, names: list[str]) -> bytes:
    """Return what a device signs about the devices whose updates are summed."""
    return b"survivors\n" + msgspec.json.encode(sorted(names)) + b"\n" + occasion.context


def cohort_digest(members: Iterable[SecureMember], threshold: int) -> bytes:
    """Return a digest of the cohort as a device was shown it: names, keys and threshold."""
    keys = [[member.name, member.mask_key, member.share_key] for member in members]
    return hashlib.sha256(msgspec.json.encode([threshold, keys])).digest()


def signed(statement: bytes, credential: Credential) -> bytes:
    """Return the signature by a device's key."""
    return load_key(credential.key_pem).sign(statement, _SIGNATURE)


def certificate_der(credential: Credential) -> bytes:
    """Return a device's certificate as it is sent."""
    return load_certificate(credential.certificate_pem).public_bytes(Encoding.DER)


@dataclass(frozen=True)
class _Holder:
    """A device's public key, and its numbers, by which keys are compared."""

    key: ec.EllipticCurvePublicKey
    numbers: ec.EllipticCurvePublicNumbers


@lru_cache(_KEPT)
def _holder(name: str, certificate_der: bytes) -> _Holder:
    """Return the key of a certificate that is in a device's name. Errors are those of `check_signed`."""
    try:
        certificate = x509.load_der_x509_certificate(certificate_der)
        names = [held.value for held in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        key = certificate.public_key()
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise UpdateRefused(f"the certificate of {name} in the cohort's list cannot be read") from None
    if names != [name] or not isinstance(key, ec.EllipticCurvePublicKey):
        raise UpdateRefused(f"the certificate of {name} in the cohort's list is of another name or kind")
    return _Holder(key, key.public_numbers())


@lru_cache(_KEPT)
def _lifetime(certificate_der: bytes, authority_pem: bytes) -> Lifetime:
    """Return when a certificate is valid that this authority has issued."""
    certificate = x509.load_der_x509_certificate(certificate_der)
    certificate.verify_directly_issued_by(load_certificate(authority_pem))
    return Lifetime(certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def check_signed(member: SecureMember, signature: bytes, statement: bytes) -> ec.EllipticCurvePublicNumbers:
    """Check a member's signature against its certificate, and return the numbers of the certificate's key.

    Raises:
        UpdateRefused: The signature does not fit; or the certificate cannot be read, or has another name or kind of key.
    """
    holder = _holder(member.name, member.certificate[:CERTIFICATE_BYTES])
    try:
        holder.key.verify(signature[:SIGNATURE_BYTES], statement, _SIGNATURE)
    except InvalidSignature:
        raise UpdateRefused(f"the signature of {member.name} in the cohort's list is not of its certificate") from None
    return holder.numbers


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
