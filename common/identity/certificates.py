"""X.509 certificates of a federation, in two shapes: the authority's, and a leaf for one purpose."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CLOCK_ALLOWANCE = timedelta(days=1)  # a certificate that begins later than this by the clock here was issued by another clock
CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH
SERVER = ExtendedKeyUsageOID.SERVER_AUTH
# RFC 5280, 4.1.2.5: the last date stands for "does not expire".
FIRST_DAY = datetime(2020, 1, 1, tzinfo=timezone.utc)
LAST_DAY = datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone.utc)


def subject(common_name: str) -> x509.Name:
    """Return the X.509 name with this common name and nothing else."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


# The same for every federation, so that a device can rebuild a trust anchor from the public key in its token.
AUTHORITY = subject("Attune federation authority")


class Lifetime(msgspec.Struct, frozen=True):
    """Validity period of a certificate, both ends included; both times know their time zone."""

    not_before: datetime
    not_after: datetime


def _usage(*, authority: bool) -> x509.KeyUsage:
    # digitalSignature only, on leaves: without this extension the chain check lets a leaf that is itself a trust root
    # (a token's bootstrap certificate) vouch for others, even though it says CA:FALSE.
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def authority_certificate(key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    """Return the authority's certificate for `key`. It never expires, because devices pin the key, not a date.

    Args:
        key: The authority's public key.
        signer: The key that signs. With the authority's own private key the result is ca.pem. With any other key the
            result still works as a trust anchor, because TLS libraries do not check the signature of an anchor.
    """
    return (
        x509.CertificateBuilder(
            issuer_name=AUTHORITY,
            subject_name=AUTHORITY,
            public_key=key,
            serial_number=x509.random_serial_number(),
            not_valid_before=FIRST_DAY,
            not_valid_after=LAST_DAY,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .sign(signer, hashes.SHA256())
    )


def leaf_certificate(
    key: ec.EllipticCurvePublicKey,
    name: x509.Name,
    purpose: x509.ObjectIdentifier,
    lifetime: Lifetime,
    *,
    issuer: x509.Name,
    signer: ec.EllipticCurvePrivateKey,
    host: str | None = None,
    serial: int | None = None,
) -> x509.Certificate:
    """Return a certificate that is good for one purpose and cannot issue other certificates.

    Args:
        key: The public key that the certificate is for.
        name: The subject.
        purpose: The extended key usage: CLIENT or SERVER.
        lifetime: When the certificate is valid.
        issuer: The issuer's name.
        signer: The issuer's private key.
        host: The DNS name that the certificate proves, or None.
        serial: The serial number; None draws a random one. Equal arguments with a serial give equal bytes.
    """
    builder = (
        x509.CertificateBuilder(
            issuer_name=issuer,
            subject_name=name,
            public_key=key,
            serial_number=x509.random_serial_number() if serial is None else serial,
            not_valid_before=lifetime.not_before,
            not_valid_after=lifetime.not_after,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        # By key id only: a rebuilt trust anchor has another serial number than ca.pem.
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if host is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    return builder.sign(signer, hashes.SHA256(), ecdsa_deterministic=serial is not None)
