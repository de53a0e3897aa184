"""Credentials on disk, and their dates."""

import hashlib
import ssl
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from attune.common.errors import CertificateRefused, HomeMismatch, NotEnrolled
from attune.common.identity.credential import (
    Credential,
    check_dates,
    csr_der,
    fingerprint_of,
    load_or_new_key,
    needs_renewal,
    new_key,
    not_after,
)
from attune.fedserver.identity.authority import Authority

START = datetime(2030, 1, 1, tzinfo=timezone.utc)


def test_saved_is_loaded_and_private(authority: Authority, device: Any, home: Path) -> None:
    credential = device(authority)
    path = credential.save(home)
    assert Credential.load(home) == credential
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in home.iterdir()] == ["device.pem"]


def test_a_renewed_credential_replaces_key_and_certificate_together(authority: Authority, device: Any, home: Path) -> None:
    device(authority).save(home)
    renewed = device(authority)
    renewed.save(home)
    assert Credential.load(home) == renewed


def test_none_yet(home: Path) -> None:
    with pytest.raises(NotEnrolled, match="fedclient join"):
        Credential.load(home)


@pytest.mark.parametrize("damage", ["cut", "another key", "no key", "garbage"])
def test_a_damaged_credential_is_refused(authority: Authority, device: Any, home: Path, damage: str) -> None:
    credential = device(authority)
    path = credential.save(home)
    path.write_bytes(
        {
            "cut": path.read_bytes()[:-40],
            "another key": new_key() + credential.certificate_pem,
            "no key": credential.certificate_pem,
            "garbage": b"\0\xff",
        }[damage]
    )
    with pytest.raises(HomeMismatch, match="damaged"):
        Credential.load(home)


def test_the_key_outlives_a_lost_answer(home: Path) -> None:
    first = load_or_new_key(home / "key.pem")
    assert load_or_new_key(home / "key.pem") == first
    assert (home / "key.pem").stat().st_mode & 0o777 == 0o600


def test_renewal_is_due_after_two_thirds_of_life(authority: Authority) -> None:
    pem = authority.issue_device(csr_der(new_key(), "pi"), "pi", 30, now=START + timedelta(hours=1))
    # Valid from START (an hour's allowance) to START + 30 days 1 hour = 721 hours; two thirds are 480 hours 40 minutes.
    due = START + timedelta(hours=480, minutes=40)
    assert not_after(pem) == START + timedelta(hours=721)
    assert not needs_renewal(pem, due - timedelta(seconds=1))
    assert needs_renewal(pem, due)


def test_dates_are_checked_at_both_ends(authority: Authority) -> None:
    pem = authority.issue_device(csr_der(new_key(), "pi"), "pi", 30, now=START + timedelta(hours=1))
    check_dates(pem, START)
    check_dates(pem, START + timedelta(hours=721))
    with pytest.raises(CertificateRefused, match="expired on 2030-01-31 01:00 UTC"):
        check_dates(pem, START + timedelta(hours=721, seconds=1))
    with pytest.raises(CertificateRefused, match="valid from 2030-01-01 00:00 UTC"):
        check_dates(pem, START - timedelta(seconds=1))


def test_what_is_no_certificate_is_refused() -> None:
    with pytest.raises(CertificateRefused, match="cannot be read"):
        fingerprint_of(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_a_certificate_with_any_one_bit_flipped_never_crashes(authority: Authority) -> None:
    key = new_key()
    good = ssl.PEM_cert_to_DER_cert(authority.issue_device(csr_der(key, "pi"), "pi", 30).decode())
    refused = 0
    for bit in range(8 * len(good)):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        pem = ssl.DER_cert_to_PEM_cert(bytes(flipped)).encode()
        Credential(key, pem).fits()
        try:
            assert fingerprint_of(pem) == hashlib.sha256(flipped).hexdigest()
        except CertificateRefused:
            refused += 1
    assert 0 < refused < 8 * len(good)
