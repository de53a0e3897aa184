"""Private key with its certificate: how they are made and stored, and how dates and fingerprint are read."""

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
from cryptography.x509.oid import NameOID

from attune.common.durable import write_file
from attune.common.errors import CertificateRefused, HomeMismatch, NotEnrolled
from attune.common.identity.certificates import subject
from attune.common.text import clean

_BEGIN_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"


@dataclass(frozen=True)
class Credential:
    """PKCS#8 key and its certificate, both PEM. They are stored in one file, so one rename replaces both."""

    key_pem: bytes = field(repr=False)
    certificate_pem: bytes

    def save(self, folder: Path, name: str = "device") -> Path:
        """Write FOLDER/NAME.pem (mode 0600, durable) and return its path.

        Raises:
            DiskFull: The disk has no room.
        """
        path = folder / f"{name}.pem"
        write_file(path, self.key_pem + self.certificate_pem)
        return path

    @classmethod
    def load(cls, folder: Path, name: str = "device") -> Credential:
        """Read what `save` wrote.

        Raises:
            NotEnrolled: The file does not exist.
            HomeMismatch: The file is damaged.
        """
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
        """Return whether the certificate is for this key; False also if one of them cannot be read."""
        try:
            key = load_key(self.key_pem)
            return key.public_key() == load_certificate(self.certificate_pem).public_key()
        except (ValueError, UnsupportedAlgorithm, CertificateRefused):
            return False

    def issued_by(self, authority_pem: bytes) -> bool:
        """Return whether this authority signed the certificate; False also if one of them cannot be read."""
        try:
            load_certificate(self.certificate_pem).verify_directly_issued_by(load_certificate(authority_pem))
        except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm, CertificateRefused):
            return False
        return True


def new_key() -> bytes:
    """Return a fresh P-256 private key as PKCS#8 PEM."""
    return key_pem(ec.generate_private_key(ec.SECP256R1()))


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the private key as unencrypted PKCS#8 PEM."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def load_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the P-256 private key in `pem`.

    Raises:
        CertificateRefused: `pem` holds no P-256 key.
    """
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise CertificateRefused(f"The private key cannot be read ({error}). Enrol again.") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateRefused("The private key is not a P-256 key. Enrol again.")
    return key


def load_or_new_key(path: Path) -> bytes:
    """Return the key at `path`. If there is none, make one and write it there (mode 0600, durable).

    A device writes its key to disk before it asks for a certificate. If the answer is lost, it asks again with the same key,
    so the server does not treat it as another device that wants the same name.

    Raises:
        CertificateRefused: The file holds no P-256 key.
        DiskFull: The disk has no room for a new key.
    """
    if path.exists():
        pem = path.read_bytes()
        load_key(pem)
        return pem
    pem = new_key()
    write_file(path, pem)
    return pem


def csr_der(key_pem: bytes, name: str) -> bytes:
    """Return a PKCS#10 certificate request for this key, as DER."""
    request = x509.CertificateSigningRequestBuilder(subject(name)).sign(load_key(key_pem), hashes.SHA256())
    return request.public_bytes(Encoding.DER)


def load_certificate(pem: bytes) -> x509.Certificate:
    """Return the first certificate in `pem`.

    Raises:
        CertificateRefused: `pem` holds no readable certificate.
    """
    try:
        return x509.load_pem_x509_certificate(pem)
    except (ValueError, x509.InvalidVersion) as error:
        raise CertificateRefused(f"The certificate cannot be read ({error}). Enrol again.") from error


@lru_cache(maxsize=1024)  # every call of a peer asks for it, for the same few certificates
def fingerprint_of(pem: bytes) -> str:
    """Return the lower hex SHA-256 of the first certificate in `pem` (its DER form). It is the identity of its holder."""
    return load_certificate(pem).fingerprint(hashes.SHA256()).hex()


def key_fingerprint_of(pem: bytes) -> str:
    """Return the lower hex SHA-256 of the certificate's public key (DER SubjectPublicKeyInfo).

    A renewal for the same key does not change it.
    """
    spki = load_certificate(pem).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()


def neutral_name(key: bytes) -> str:
    """Return a device's name that tells nothing about its place: `device-` and 48 bits of its public key's SHA-256."""
    spki = load_key(key).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return f"device-{hashlib.sha256(spki).hexdigest()[:12]}"


def short_form(authority_pem: bytes) -> str:
    """Return a short form of an authority's public key, `1a2b-3c4d-...` (80 bits), for people to compare.

    It is equal for ca.pem and for the trust anchor that a device rebuilds from its token. No code decides by it.
    """
    digest = key_fingerprint_of(authority_pem)
    return "-".join(digest[start : start + 4] for start in range(0, 20, 4))


def server_name(authority_pem: bytes) -> str:
    """Return the TLS name of this authority's server.

    Each federation has another name, so a proxy can serve several federations on one port. The name is equal for ca.pem
    and for the trust anchor that a device rebuilds from its token.
    """
    return f"{key_fingerprint_of(authority_pem)[:32]}.attune"


def check_common_name(pem: bytes, name: str) -> None:
    """Check that the certificate has this device's name.

    Raises:
        CertificateRefused: It has another name, or none.
    """
    names = [str(attribute.value) for attribute in load_certificate(pem).subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [name]:
        sent = ", ".join(map(clean, names)) or "nobody"
        raise CertificateRefused(f"the server sent a certificate in the name of {sent}, not of {name}; ask the operator why")


def not_after(pem: bytes) -> datetime:
    """Return when the certificate expires (UTC)."""
    return load_certificate(pem).not_valid_after_utc


def needs_renewal(pem: bytes, now: datetime) -> bool:
    """Return whether two thirds of the certificate's life are over; `now` knows its time zone."""
    certificate = load_certificate(pem)
    life = certificate.not_valid_after_utc - certificate.not_valid_before_utc
    return now >= certificate.not_valid_before_utc + life * 2 / 3


def is_valid_at(pem: bytes, now: datetime) -> bool:
    """Return whether the certificate's dates include `now`, which knows its time zone."""
    certificate = load_certificate(pem)
    return certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc


def check_dates(pem: bytes, now: datetime) -> None:
    """Check that the certificate is valid at `now`.

    Raises:
        CertificateRefused: It is not valid yet, or no longer; the message has the dates.
    """
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
    """Return an authority's public key as a compressed P-256 point, 33 bytes.

    Raises:
        CertificateRefused: The key is of another kind.
    """
    try:
        key = load_certificate(authority_pem).public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise CertificateRefused(f"The authority's key cannot be read ({error}).") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise CertificateRefused("The authority's key is not on P-256.")
    return key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
