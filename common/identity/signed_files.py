"""Signature of a finished model or of an export: who of which federation wrote these files, with their digests.

A device signs by the key of its certificate, and the server by the authority's. So who knows the authority's certificate
can check the files without a network.
"""

from __future__ import annotations

import hashlib
import stat
import time
from collections.abc import Collection, Iterable
from datetime import datetime, timezone
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from attune.common.durable import PUBLIC, read_small, write_file
from attune.common.errors import CertificateRefused, FingerprintMismatch, HomeMismatch
from attune.common.identity.certificates import CLOCK_ALLOWANCE
from attune.common.identity.credential import (
    Credential,
    check_common_name,
    is_valid_at,
    key_fingerprint_of,
    load_certificate,
    load_key,
    short_form,
)
from attune.common.text import clean, from_json, newer_format

FILE = "signature.json"  # in a folder; a file's own has this behind its name
REVOKED = "revoked.json"  # in the server's export: fingerprints of the keys of revoked devices
_PURPOSE = b"attune signed files, version 1\n"  # TLS signs by the same keys: no signature passes for one of the other kind
_MOST_BYTES, FORMAT = 16 << 20, 1
_ECDSA = ec.ECDSA(hashes.SHA256())


class Statement(msgspec.Struct, frozen=True):
    """Signed words: who says them (a device's name; empty: the authority), when (unix time), and of which files."""

    signer: str
    signed_at: float
    files: dict[str, str]


class _Signed(msgspec.Struct, frozen=True):
    statement: str  # the JSON text, because its bytes are signed
    signature: bytes
    certificate: str
    authority: str
    format: int = FORMAT


def sign(place: Path, paths: Iterable[Path], credential: Credential, authority_pem: bytes, signer: str) -> Path:
    """Write the signature of files beside them, and return its path.

    Args:
        place: A folder, or the one file that is signed.
        paths: The files.
        credential: Key and certificate of the signer.
        authority_pem: The federation's authority.
        signer: The device's name; empty: the authority itself signs.
    """
    files = {_name_in(place, path): _digest_of(path) for path in paths}
    statement = msgspec.json.encode(Statement(signer, time.time(), dict(sorted(files.items()))))
    signature = load_key(credential.key_pem).sign(_PURPOSE + statement, _ECDSA)
    signed = _Signed(statement.decode(), signature, credential.certificate_pem.decode(), authority_pem.decode())
    target = _signature_of(place)
    write_file(target, msgspec.json.format(msgspec.json.encode(signed)), PUBLIC, durable=False)
    return target


def verify(place: Path, authority_pem: bytes, revoked: Collection[str] = ()) -> Statement:
    """Check the signature of a folder or a file, and return what it says.

    Args:
        place: The folder or file, perhaps a stranger's.
        authority_pem: The authority that must have issued the signer's certificate.
        revoked: Fingerprints of keys whose signature does not count.

    Raises:
        CertificateRefused: There is no signature, or the signer's certificate had expired or is revoked.
        FingerprintMismatch: It is of another federation.
        HomeMismatch: The signature is not by this key, or a file was changed, added or removed.
    """
    try:
        text = read_small(_signature_of(place), _MOST_BYTES)
        if newer := newer_format(text, _signature_of(place), "fedclient", FORMAT):
            raise HomeMismatch(newer)
        signed = from_json(text, _Signed)
        statement = from_json(signed.statement, Statement)
    except FileNotFoundError:
        raise CertificateRefused(f"{place} has no signature: {_signature_of(place).name} is missing") from None
    except (OSError, msgspec.DecodeError) as error:
        raise HomeMismatch(f"the signature of {place} cannot be read: {error}") from None
    certificate = signed.certificate.encode()
    _check_signer(place, statement, certificate, authority_pem, revoked)
    key = load_certificate(certificate).public_key()
    try:
        assert isinstance(key, ec.EllipticCurvePublicKey)  # noqa: S101 (the authority issues no others)
        key.verify(signed.signature, _PURPOSE + signed.statement.encode(), _ECDSA)
    except InvalidSignature:
        raise HomeMismatch(f"the signature of {place} was not made by {_who(statement)}") from None
    present = {_name_in(place, path): path for path in files_in(place)}
    for name in sorted(present.keys() ^ statement.files.keys()):
        raise HomeMismatch(f"{place}: {clean(name)} " + ("is not signed" if name in present else "is signed and missing"))
    for name, path in present.items():
        if _digest_of(path) != statement.files[name]:
            raise HomeMismatch(f"{path} is not the file that {_who(statement)} signed")
    return statement


def revoked_in(export: Path, authority_pem: bytes) -> list[str]:
    """Return the revoked keys of a server's export, whose own signature is checked. Errors are those of `verify`."""
    if verify(export, authority_pem).signer:
        raise HomeMismatch(f"{export} was signed by a device: the list of revoked keys comes from `fedserver export`")
    return from_json((export / REVOKED).read_bytes(), list[str])


def files_in(place: Path) -> list[Path]:
    """Return the files below a folder but its signature, or the one file.

    Raises:
        HomeMismatch: One is a link, a pipe or a device.
    """
    paths = sorted(place.rglob("*")) if place.is_dir() else [place]
    files = [path for path in paths if path != _signature_of(place) and not (path.is_dir() and not path.is_symlink())]
    for path in files:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise HomeMismatch(f"{path} is no regular file, so it cannot be signed")
    return files


def _check_signer(place: Path, said: Statement, certificate: bytes, authority_pem: bytes, revoked: Collection[str]) -> None:
    key = key_fingerprint_of(certificate)
    by_authority = not said.signer and key == key_fingerprint_of(authority_pem)
    if not by_authority and not Credential(b"", certificate).issued_by(authority_pem):
        raise FingerprintMismatch(
            f"{place} was signed in another federation than {short_form(authority_pem)}, or by nobody's certificate"
        )
    when = datetime.fromtimestamp(said.signed_at, timezone.utc)
    if not by_authority:
        check_common_name(certificate, said.signer)
    if not is_valid_at(certificate, when) or when > datetime.now(timezone.utc) + CLOCK_ALLOWANCE:
        raise CertificateRefused(f"{place} was signed on {when:%Y-%m-%d} by a certificate that was not valid then")
    if key in revoked:
        raise CertificateRefused(f"{place} was signed by {_who(said)}, which the operator has revoked")


def _who(said: Statement) -> str:
    return clean(said.signer) or "the authority"


def _name_in(place: Path, path: Path) -> str:
    return path.name if path == place else path.relative_to(place).as_posix()


def _signature_of(place: Path) -> Path:
    return place / FILE if place.is_dir() else place.with_name(f"{place.name}.{FILE}")


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
