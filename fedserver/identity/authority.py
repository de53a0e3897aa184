"""The federation's certificate authority: makes it, keeps it, and issues certificates for devices, operators and servers."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from attune.common.durable import PUBLIC, write_file
from attune.common.errors import CertificateRefused, HomeMismatch
from attune.common.identity.certificates import (
    AUTHORITY,
    CLIENT,
    FIRST_DAY,
    SERVER,
    Lifetime,
    authority_certificate,
    leaf_certificate,
    subject,
)
from attune.common.identity.credential import (
    Credential,
    fingerprint_of,
    key_pem,
    load_certificate,
    load_key,
    new_key,
    public_key_of,
    server_name,
    short_form,
)
from attune.common.identity.names import check_name

KEY_FILE = "ca-key.pem"
CERTIFICATE_FILE = "ca.pem"
MAX_REQUEST_BYTES = 4096
SERVER_DAYS = 90.0  # for which a server's certificate is good
# Devices' clocks are behind more often than ahead.
_CLOCK_SKEW = timedelta(hours=1)


class RequestRefused(CertificateRefused):
    """The certificate request is malformed, too large, or not for a P-256 key.

    What to do: Use a current `fedclient`.
    """

    kind, status = "request-refused", "INVALID_ARGUMENT"


def authority_certificate_in(folder: Path) -> bytes | None:
    """Return the certificate of the authority in `folder` as PEM; None if it has none.

    Raises:
        HomeMismatch: It is damaged.
    """
    try:
        pem = (folder / CERTIFICATE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    try:
        load_certificate(pem)
    except CertificateRefused:
        raise HomeMismatch(f"{CERTIFICATE_FILE} in {folder} is damaged: restore it from a backup") from None
    return pem


@dataclass(frozen=True)
class Authority:
    """The federation's certificate authority. Its private key lives in the server's process and home, nowhere else."""

    certificate_pem: bytes
    _key: ec.EllipticCurvePrivateKey = field(repr=False)

    @classmethod
    def create(cls, folder: Path) -> Authority:
        """Make a new authority, and store it in `folder`.

        Raises:
            HomeMismatch: There is one already.
            DiskFull: There is no space for it.
        """
        if (folder / CERTIFICATE_FILE).exists():
            raise HomeMismatch(f"{folder} already holds a federation's authority. Use another folder, or load this one.")
        key = load_key(new_key())
        pem = authority_certificate(key.public_key(), key).public_bytes(Encoding.PEM)
        # The certificate comes last and makes it count: a key left alone by a crash has signed nothing yet.
        write_file(folder / KEY_FILE, key_pem(key))
        write_file(folder / CERTIFICATE_FILE, pem, PUBLIC)
        return cls(pem, key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Load the authority that `create` made.

        Raises:
            HomeMismatch: It is missing, damaged, or two that were mixed up.
        """
        try:
            credential = Credential((folder / KEY_FILE).read_bytes(), (folder / CERTIFICATE_FILE).read_bytes())
        except FileNotFoundError as error:
            raise HomeMismatch(f"{error.filename} is missing: {folder} holds no complete authority. Restore it.") from None
        if not credential.fits():
            raise HomeMismatch(
                f"{KEY_FILE} and {CERTIFICATE_FILE} in {folder} are damaged or do not belong together. "
                "Restore both from the same backup."
            )
        return cls(credential.certificate_pem, load_key(credential.key_pem))

    @property
    def fingerprint(self) -> str:
        """Lower hex SHA-256 of the certificate's DER, as `openssl x509 -fingerprint -sha256` shows it."""
        return fingerprint_of(self.certificate_pem)

    @property
    def short_fingerprint(self) -> str:
        """The form for people, which a device can also compute from its token; see `short_form`."""
        return short_form(self.certificate_pem)

    @property
    def public_key_compressed(self) -> bytes:
        """The public key as a compressed P-256 point, 33 bytes: what a join token pins."""
        return public_key_of(self.certificate_pem)

    @property
    def credential(self) -> Credential:
        """Key and certificate of the authority itself, with which it signs an export."""
        return Credential(key_pem(self._key), self.certificate_pem)

    def issue_device(self, csr_der: bytes, name: str, days: float, now: datetime | None = None) -> bytes:
        """Issue a certificate (PEM) for the key in a device's PKCS#10 request, good for acting as a client only.

        Only the key of the request is used: names, and extensions that it may ask for, are ignored.

        Args:
            csr_der: The request.
            name: The device's name, for people.
            days: How long the certificate is valid.
            now: The time from which it counts; None: the present.

        Raises:
            RequestRefused: The request is none.
            SettingError: The name cannot be.
        """
        start, life = now or datetime.now(timezone.utc), timedelta(days=days)
        lifetime = Lifetime(start - min(_CLOCK_SKEW, life / 4), start + life)  # or a short one would be due at once
        return self._signed(request_key(csr_der), check_name(name), CLIENT, lifetime)

    def issue_operator(self, days: float = 3650) -> Credential:
        """Issue a client credential for admin calls. Its fingerprint alone says that it is an operator's.

        Its dates begin with the authority's, so that it stays good if the clock was ahead while it was made.
        """
        return self._issue_credential("operator", CLIENT, days, None)

    def issue_server(self, days: float = SERVER_DAYS, now: datetime | None = None) -> Credential:
        """Issue a credential for acting as the server only, under the federation's own name; good from the first day on."""
        return self._issue_credential(server_name(self.certificate_pem), SERVER, days, now)

    def _issue_credential(self, name: str, purpose: x509.ObjectIdentifier, days: float, now: datetime | None) -> Credential:
        key, ends = load_key(new_key()), (now or datetime.now(timezone.utc)) + timedelta(days=days)
        lifetime = Lifetime(FIRST_DAY, max(ends, FIRST_DAY))
        return Credential(key_pem(key), self._signed(key.public_key(), name, purpose, lifetime))

    def _signed(self, key: ec.EllipticCurvePublicKey, name: str, purpose: x509.ObjectIdentifier, lifetime: Lifetime) -> bytes:
        host = name if purpose == SERVER else None
        certificate = leaf_certificate(key, subject(name), purpose, lifetime, issuer=AUTHORITY, signer=self._key, host=host)
        return certificate.public_bytes(Encoding.PEM)


def request_key(csr_der: bytes) -> ec.EllipticCurvePublicKey:
    """Return the P-256 key that a PKCS#10 request proves to hold.

    Raises:
        RequestRefused: It proves no such key.
    """
    if len(csr_der) > MAX_REQUEST_BYTES:
        raise RequestRefused(f"A certificate request of {len(csr_der)} bytes is over the limit of {MAX_REQUEST_BYTES}.")
    try:
        request = x509.load_der_x509_csr(csr_der)
        key = request.public_key()
        signed = request.is_signature_valid
    except (ValueError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise RequestRefused(f"The certificate request cannot be read ({error}).") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise RequestRefused("The certificate request is for a key that is not on P-256. Make the key with this version.")
    if not signed:
        raise RequestRefused("The certificate request is not signed by the key it names.")
    return key
