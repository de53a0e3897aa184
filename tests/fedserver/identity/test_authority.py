"""The authority: the certificates that it signs, those that it refuses, and its files."""

import hashlib
import os
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from attune.common.errors import CertificateRefused, HomeMismatch, SettingError
from attune.common.identity.certificates import authority_certificate, subject
from attune.common.identity.credential import (
    check_dates,
    csr_der,
    load_certificate,
    load_key,
    needs_renewal,
    new_key,
    public_key_of,
    server_name,
)
from attune.fedserver.identity.authority import Authority, RequestRefused, request_key
from attune.fedserver.identity.bound_secrets import commitments_of
from attune.fedserver.ports.blobs import Blobs


class NoBlobs(Blobs):
    """Blobs of a home without a secret of noise."""

    def get(self, key: str) -> bytes:
        raise KeyError(key)


def _purposes(pem: bytes) -> list[x509.ObjectIdentifier]:
    return list(load_certificate(pem).extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)


def _names(pem: bytes) -> list[Any]:
    alternative = load_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [name.value for name in alternative]


def test_what_was_created_is_loaded(home: Path) -> None:
    created = Authority.create(home)
    loaded = Authority.load(home)
    assert loaded.certificate_pem == created.certificate_pem
    key = new_key()
    certificate = load_certificate(loaded.issue_device(csr_der(key, "pi"), "pi", 1))
    certificate.verify_directly_issued_by(load_certificate(created.certificate_pem))


def test_files_are_private_and_no_leftovers_stay(home: Path) -> None:
    old_umask = os.umask(0)
    try:
        Authority.create(home)
    finally:
        os.umask(old_umask)
    assert {path.name: path.stat().st_mode & 0o777 for path in home.iterdir()} == {"ca-key.pem": 0o600, "ca.pem": 0o644}
    assert home.stat().st_mode & 0o777 == 0o700


def test_a_second_authority_never_replaces_the_first(home: Path) -> None:
    first = Authority.create(home)
    with pytest.raises(HomeMismatch, match="already holds"):
        Authority.create(home)
    assert Authority.load(home).fingerprint == first.fingerprint


def test_a_crash_between_key_and_certificate_does_no_harm(home: Path) -> None:
    Authority.create(home)
    (home / "ca.pem").unlink()
    with pytest.raises(HomeMismatch, match=r"ca\.pem is missing"):
        Authority.load(home)
    assert Authority.create(home).fingerprint == Authority.load(home).fingerprint


def test_a_mixed_up_authority_is_not_loaded(home: Path, stranger: Authority) -> None:
    Authority.create(home)
    (home / "ca.pem").write_bytes(stranger.certificate_pem)
    with pytest.raises(HomeMismatch, match="do not belong together"):
        Authority.load(home)
    (home / "ca.pem").write_bytes(b"no certificate")
    with pytest.raises(HomeMismatch, match="damaged"):
        Authority.load(home)


def test_a_certificate_with_any_byte_flipped_is_read_or_said_to_be_damaged(home: Path) -> None:
    """Upper case becomes lower case, and digits control characters: then the server must not be told to enrol again."""
    Authority.create(home)
    whole, told = (home / "ca.pem").read_bytes(), set[str]()
    for at in range(len(whole)):
        (home / "ca.pem").write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
        try:
            commitments_of(home, NoBlobs())
        except HomeMismatch as error:
            told.add(str(error))
    assert told == {f"ca.pem in {home} is damaged: restore it from a backup"}


def test_every_authority_has_the_same_name_and_its_own_key(authority: Authority, stranger: Authority) -> None:
    ours, theirs = load_certificate(authority.certificate_pem), load_certificate(stranger.certificate_pem)
    assert ours.subject == theirs.subject == ours.issuer
    assert authority.public_key_compressed != stranger.public_key_compressed
    assert len(authority.public_key_compressed) == 33
    assert isinstance(ours.signature_hash_algorithm, hashes.SHA256)


def test_fingerprint_is_the_digest_of_the_der(authority: Authority) -> None:
    der = ssl.PEM_cert_to_DER_cert(authority.certificate_pem.decode())
    assert authority.fingerprint == hashlib.sha256(der).hexdigest()
    assert [len(group) for group in authority.short_fingerprint.split("-")] == [4] * 5


def test_a_devices_certificate(authority: Authority) -> None:
    key = new_key()
    now = datetime(2030, 1, 1, tzinfo=timezone.utc)
    certificate = load_certificate(authority.issue_device(csr_der(key, "asked-for"), "given", 30, now=now))
    assert certificate.subject == subject("given")
    assert certificate.public_key() == load_key(key).public_key()
    assert certificate.not_valid_after_utc == now + timedelta(days=30)
    assert now - timedelta(days=1) < certificate.not_valid_before_utc < now
    assert _purposes(certificate.public_bytes(Encoding.PEM)) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_extensions_in_a_request_are_ignored(authority: Authority) -> None:
    key = load_key(new_key())
    request = (
        x509.CertificateSigningRequestBuilder(subject("pi"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server_name(authority.certificate_pem))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = authority.issue_device(request.public_bytes(Encoding.DER), "pi", 1)
    extensions = load_certificate(pem).extensions
    assert not extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert _purposes(pem) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    with pytest.raises(x509.ExtensionNotFound):
        extensions.get_extension_for_class(x509.SubjectAlternativeName)


def test_server_and_operator(authority: Authority) -> None:
    server = authority.issue_server(days=7)
    operator = authority.issue_operator()
    assert server.fits() and operator.fits()
    assert _names(server.certificate_pem) == [server_name(authority.certificate_pem)]
    assert _purposes(server.certificate_pem) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert _purposes(operator.certificate_pem) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer = load_certificate(server.certificate_pem).extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
    assert issuer.key_identifier and issuer.authority_cert_serial_number is None and issuer.authority_cert_issuer is None


def test_a_request_must_be_signed_by_its_own_key(authority: Authority) -> None:
    request = bytearray(csr_der(new_key(), "pi"))
    # The last bytes are the signature's second number.
    request[-1] ^= 1
    with pytest.raises(RequestRefused, match="not signed by the key"):
        authority.issue_device(bytes(request), "pi", 1)


@pytest.mark.parametrize("key", [ec.generate_private_key(ec.SECP384R1()), ed25519.Ed25519PrivateKey.generate()])
def test_a_key_of_another_kind_is_refused(authority: Authority, key: Any) -> None:
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    request = x509.CertificateSigningRequestBuilder(subject("pi")).sign(key, algorithm)
    with pytest.raises(RequestRefused, match="not on P-256"):
        authority.issue_device(request.public_bytes(Encoding.DER), "pi", 1)


def test_a_foreign_authoritys_key_is_refused() -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    pem = authority_certificate(key.public_key(), key).public_bytes(Encoding.PEM)
    with pytest.raises(CertificateRefused, match="not on P-256"):
        public_key_of(pem)


def test_an_oversized_request_is_refused(authority: Authority) -> None:
    with pytest.raises(RequestRefused, match="4097 bytes is over the limit"):
        authority.issue_device(bytes(4097), "pi", 1)


def test_a_bad_name_is_refused(authority: Authority) -> None:
    with pytest.raises(SettingError):
        authority.issue_device(csr_der(new_key(), "pi"), "../pi", 1)


def test_a_request_with_any_one_bit_flipped_proves_no_other_key() -> None:
    good = csr_der(new_key(), "pi")
    key, accepted = request_key(good), []
    for bit in range(8 * len(good)):
        request = bytearray(good)
        request[bit // 8] ^= 1 << bit % 8
        try:
            assert request_key(bytes(request)) == key
            accepted.append(bit // 8)
        except RequestRefused:
            continue
    # Only the signature's count of unused bits may change unnoticed, and only if those bits are zero anyway.
    signature_bytes = len(x509.load_der_x509_csr(good).signature)
    assert set(accepted) <= {len(good) - signature_bytes - 1}


@given(st.binary(max_size=300))
def test_bytes_that_are_no_request_are_refused(data: bytes) -> None:
    with pytest.raises(RequestRefused, match="cannot be read"):
        request_key(data)


def test_a_certificate_for_a_minute_is_not_due_at_once_but_in_time(tmp_path):
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    pem = Authority.create(tmp_path).issue_device(csr_der(new_key(), "pi"), "pi", 60 / 86400, now=now)
    assert not needs_renewal(pem, now + timedelta(seconds=30))
    assert needs_renewal(pem, now + timedelta(seconds=40))
    check_dates(pem, now - timedelta(seconds=15))  # the check of a device whose clock is behind
