"""A private key and the certificate for it: making, keeping, and reading its dates and fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from attune.common.durable import write_file
from attune.common.errors import CertificateRefused, HomeMismatch, NotEnrolled
from attune.common.identity.certificates import subject

_BEGIN_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True)
class Credential:
    """A PKCS#8 key and its certificate, both PEM. Kept as one file, because one rename must replace both."""

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes

    def save(self, folder: Path, name: str = "device") -> Path:
        """Writes FOLDER/NAME.pem (mode 0600, durable) and returns its path. Raises DiskFull."""
        path = folder / f"{name}.pem"
        write_file(path, self.key_pem + self.certificate_pem)
        return path

    @classmethod
    def load(cls, folder: Path, name: str = "device") -> Credential:
        """Reads what `save` wrote. Raises NotEnrolled if there is none, HomeMismatch if it is damaged."""
        path = folder / f"{name}.pem"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise NotEnrolled(f"There is no certificate at {path}. Enrol first: fedclient join --token ...") from None
        key_pem, begin, rest = data.partition(_BEGIN_CERTIFICATE)
        credential = cls(key_pem, begin + rest)
        if not credential.fits():
            raise HomeMismatch(
                f"{path} is damaged: its key and certificate do not belong together. Restore it from a backup, or enrol anew "
                "with another home and name"
            )
        return credential

    def fits(self) -> bool:
        """Whether the certificate is for this key (False too if either cannot be read)."""
        try:
            key = load_key(self.key_pem)
            return key.public_key() == load_certificate(self.certificate_pem).public_key()
        except (ValueError, UnsupportedAlgorithm, CertificateRefused):
            return False

    def issued_by(self, authority_pem: bytes) -> bool:
        """Whether this authority signed the certificate (False too if either cannot be read)."""
        try:
            load_certificate(self.certificate_pem).verify_directly_issued_by(load_certificate(authority_pem))
        except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm, CertificateRefused):
            return False
        return True


def new_key() -> bytes:
    """A fresh P-256 private key, PKCS#8 PEM."""
    return key_pem(ec.generate_private_key(ec.SECP256R1()))


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """The P-256 key in `pem`. Raises CertificateRefused if there is none."""
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise CertificateRefused(f"The private key cannot be read ({error}). Enrol again.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateRefused("The private key is not a P-256 key. Enrol again.")
    return key


def load_or_new_key(path: Path) -> bytes:
    """The key at `path`, made and kept there (0600) if there is none.

    A device writes its key to disk before it asks for a certificate. If the answer is lost, it asks again with the same key,
    so the server does not treat it as another device that wants the same name.
    """
    if path.exists():
        pem = path.read_bytes()
        load_key(pem)
        return pem
    pem = new_key()
    write_file(path, pem)
    return pem


def csr_der(key_pem: bytes, name: str) -> bytes:
    """A PKCS#10 request for a certificate for this key, DER."""
    request = x509.CertificateSigningRequestBuilder(subject(name)).sign(load_key(key_pem), hashes.SHA256())
    return request.public_bytes(Encoding.DER)


def load_certificate(pem: bytes) -> x509.Certificate:
    """The first certificate in `pem`. Raises CertificateRefused if there is none."""
    try:
        return x509.load_pem_x509_certificate(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise CertificateRefused(f"The certificate cannot be read ({error}). Enrol again.") from error


@lru_cache(maxsize=1024)  # it is asked at every call, of the same few
def fingerprint_of(pem: bytes) -> str:
    """Lower hex SHA-256 of the DER of the first certificate in `pem`: the identity of who holds its key."""
    return load_certificate(pem).fingerprint(hashes.SHA256()).hex()


def key_fingerprint_of(pem: bytes) -> str:
    """Lower hex SHA-256 of the certificate's public key (DER SubjectPublicKeyInfo): it outlives renewals for the same key."""
    spki = load_certificate(pem).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def short_form(authority_pem: bytes) -> str:
    """An authority's public key as people compare it, `1a2b-3c4d-...` (80 bits).

    Equal for ca.pem and for the trust anchor a device rebuilds from its token. People compare it; no code decides by it.
    """
    digest = key_fingerprint_of(authority_pem)
    return "-".join(digest[start : start + 4] for start in range(0, 20, 4))


def server_name(authority_pem: bytes) -> str:
    """The TLS name of this authority's server. It differs for each federation, so a proxy can serve several on one port.

    Equal for ca.pem and for the trust anchor that a device rebuilds from its token.
    """
    return f"{key_fingerprint_of(authority_pem)[:32]}.attune"


def not_after(pem: bytes) -> datetime:
    """When the certificate expires (UTC)."""
    return load_certificate(pem).not_valid_after_utc


def needs_renewal(pem: bytes, now: datetime) -> bool:
    """Whether two thirds of the certificate's life are gone; `now` knows its time zone."""
    certificate = load_certificate(pem)
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return now >= certificate.not_valid_before_utc + life * 2 / 3


def check_dates(pem: bytes, now: datetime) -> None:
    """Raises CertificateRefused, with the dates, if the certificate is not yet or no longer valid at `now`."""
    certificate = load_certificate(pem)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        raise CertificateRefused(
            f"This device's certificate expired on {last:%Y-%m-%d %H:%M} UTC (it is {now:%Y-%m-%d %H:%M} here). "
            "Ask the operator for a token for this device (fedserver token --for NAME) and start fedclient with --token-file: "
            "name and state stay."
        )
    if now < first:
        raise CertificateRefused(
            f"This device's certificate is valid from {first:%Y-%m-%d %H:%M} UTC on, but it is {now:%Y-%m-%d %H:%M} here. "
            "Set this device's clock."
        )


def public_key_of(authority_pem: bytes) -> bytes:
    """An authority's public key as a compressed P-256 point, 33 bytes. Raises CertificateRefused for another kind of key."""
    try:
        key = load_certificate(authority_pem).public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertificateRefused(f"The authority's key cannot be read ({error}).") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateRefused("The authority's key is not on P-256.")
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
