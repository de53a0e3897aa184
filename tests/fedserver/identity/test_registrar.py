"""Admission of devices by fingerprints and the current content of the database."""

import asyncio
import time
from datetime import datetime, timedelta, timezone

import pytest

from attune.common import aio
from attune.common.errors import CertificateRefused, Forbidden, NameTaken, SettingError, TokenRefused
from attune.common.identity.credential import Credential, csr_der, fingerprint_of, is_valid_at, key_fingerprint_of, new_key
from attune.common.identity.token import JoinToken
from attune.fedserver.identity.admin import FederationAdmin
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.registrar import OPERATOR, Registrar, install_operator
from attune.fedserver.ports.ledger import Certificate
from attune.simulation.memory import MemoryLedger


@pytest.fixture
def authority(tmp_path):
    return Authority.create(tmp_path / "ca")


@pytest.fixture
def ledger():
    return MemoryLedger()


class Now:
    """Registrar and its ledger, with each call carried out at once."""

    def __init__(self, target):
        self._target = target

    def __getattr__(self, name):
        return lambda *arguments, **more: aio.run(getattr(self._target, name)(*arguments, **more))


@pytest.fixture
def store(ledger):
    return Now(ledger)


@pytest.fixture
def registrar(authority, ledger):
    return Now(Registrar(authority, ledger, 90.0))


@pytest.fixture
def admin(ledger):
    return Now(FederationAdmin(ledger, "a test"))


@pytest.fixture
def token(authority, admin):
    """Make a token, and return the fingerprint of its holder."""

    def make(uses=1, ttl_s=60.0, **more):
        text = admin.new_token(authority.public_key_compressed, uses, ttl_s, **more)
        return fingerprint_of(JoinToken.parse(text).bootstrap().certificate_pem)

    return make


def enrol(registrar, holder, name="a", key=None):
    return registrar.enrol(holder, name, csr_der(key or new_key(), "whatever"))


def role(registrar, fingerprint):
    found = registrar.caller(fingerprint)
    return found.role, found.name


def test_a_token_is_spent_use_by_use_and_says_why_it_ends(registrar, token, store):
    holder = token(uses=2)
    assert role(registrar, holder) == ("bootstrap", "")
    for name in ("a", "b"):
        assert role(registrar, fingerprint_of(enrol(registrar, holder, name))) == ("device", name)
    with pytest.raises(TokenRefused, match="used up"):
        enrol(registrar, holder, "c")
    with pytest.raises(TokenRefused, match="expired"):
        enrol(registrar, token(ttl_s=-1.0), "c")
    with pytest.raises(TokenRefused, match="does not know"):
        enrol(registrar, "0" * 64, "c")
    assert [device.name for device in store.devices()] == ["a", "b"]


def test_the_same_key_again_costs_nothing_another_is_refused(registrar, token):
    holder, key = token(), new_key()
    first, second = (enrol(registrar, holder, "a", key) for _ in range(2))
    assert key_fingerprint_of(first) == key_fingerprint_of(second)
    assert first != second
    with pytest.raises(NameTaken):
        enrol(registrar, token(), "a")


@pytest.mark.parametrize("name", ["", ".a", "a/b", "a" * 65])
def test_an_impossible_name_costs_no_use(registrar, token, name):
    holder = token()
    with pytest.raises(SettingError):
        enrol(registrar, holder, name)
    enrol(registrar, holder, "a")


def test_renewal_moves_the_name_to_the_new_key(registrar, token):
    old_key, key = new_key(), new_key()
    enrol(registrar, token(), "a", old_key)
    renewed = registrar.renew("a", csr_der(key, "b"))
    assert role(registrar, fingerprint_of(renewed)) == ("device", "a")
    with pytest.raises(NameTaken):
        enrol(registrar, token(), "a", old_key)


def test_who_is_revoked_or_expired_or_unknown_is_refused(registrar, token, store, authority):
    pem = enrol(registrar, token(), "a")
    store.update_device("a", revoked=True)
    with pytest.raises(CertificateRefused, match="revoked"):
        role(registrar, fingerprint_of(pem))
    with pytest.raises(CertificateRefused, match="revoked"):
        enrol(registrar, token(), "a")
    store.enrol("b", "key", Certificate("f" * 64, "b", "device", 1.0), 0.0)
    with pytest.raises(CertificateRefused, match="expired"):
        role(registrar, "f" * 64)
    with pytest.raises(Forbidden):
        role(registrar, fingerprint_of(authority.issue_device(csr_der(new_key(), "c"), "c", 1.0)))


def test_only_the_newest_operator_counts(registrar, authority, ledger, tmp_path):
    aio.run(install_operator(authority, ledger, tmp_path))
    old = fingerprint_of(Credential.load(tmp_path, OPERATOR).certificate_pem)
    assert role(registrar, old) == ("operator", "operator")
    aio.run(install_operator(authority, ledger, tmp_path))
    with pytest.raises(Forbidden):
        role(registrar, old)


def test_of_one_origin_only_the_newest_tokens_stay(token, store):
    others = token(), token(origin="local", keep=1)
    started = [token(origin="start", keep=2) for _ in range(4)]
    alive = [holder for holder in (*others, *started) if store.token(holder) is not None]
    assert alive == [*others, *started[2:]]


def test_spent_tokens_stay_in_the_handshake_to_hear_why_and_then_go(token, store, registrar):
    holder, expired = token(), token(ttl_s=-5.0)
    assert len(store.bootstrap_roots(store.token(holder).expires_at - 60, 100.0)) == 2
    enrol(registrar, holder, "a")
    used_up_at = store.token(holder).used_up_at
    assert store.bootstrap_roots(used_up_at + 99.0, 100.0) == [store.token(holder).bootstrap_pem]
    assert store.bootstrap_roots(used_up_at + 101.0, 100.0) == []
    assert store.token(expired) is not None


def test_of_two_devices_that_ask_for_the_last_use_of_a_token_one_is_enrolled(authority, ledger, token):
    holder, registrar = token(), Registrar(authority, ledger, 90.0)

    async def both():
        asked = [registrar.enrol(holder, name, csr_der(new_key(), name)) for name in ("a", "b")]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second = aio.run(both())
    assert isinstance(first, bytes)
    assert isinstance(second, TokenRefused)


@pytest.mark.parametrize("days", [100, -200])
def test_the_servers_certificate_made_by_a_wrong_clock_is_replaced(authority, ledger, days):
    registrar = Registrar(authority, ledger, 90.0)
    now = datetime.now(timezone.utc)
    registrar._server = authority.issue_server(now=now + timedelta(days=days))
    aio.run(registrar.refresh())
    assert is_valid_at(registrar._server.certificate_pem, now)


def test_certificates_issued_while_the_clock_was_ahead_do_not_count_as_too_many(registrar, token, store, monkeypatch):
    name, holder, later = "a", token(uses=1), time.time() + 100 * 86400
    with monkeypatch.context() as ahead:
        ahead.setattr("attune.fedserver.identity.registrar.time.time", lambda: later)
        ahead.setattr("attune.fedserver.identity.registrar._check_live", lambda token: None)
        enrol(registrar, holder, name)
        for _ in range(7):
            registrar.renew(name, csr_der(new_key(), name))
    assert registrar.renew(name, csr_der(new_key(), name))


def test_the_operators_certificate_is_good_whatever_the_clock_showed(authority):
    pem = authority.issue_operator().certificate_pem
    now = datetime.now(timezone.utc)
    assert is_valid_at(pem, now - timedelta(days=1000)) and is_valid_at(pem, now + timedelta(days=3000))


def test_a_revoked_name_is_given_to_another_key_by_a_token_for_it_alone(registrar, admin, token, store):
    """A thief enrolled as `ada` with a stolen token, and has a token for the name that was made before the revocation."""
    thief, owner = new_key(), new_key()
    stolen = registrar.enrol(token(), "ada", csr_der(thief, "ada"))
    early = token(only_for="ada")
    admin.revoke("ada")
    several = token(uses=9)
    for used, key in ((several, owner), (several, thief)):
        with pytest.raises(CertificateRefused, match="token --for ada"):
            registrar.enrol(used, "ada", csr_der(key, "ada"))
    with pytest.raises(TokenRefused, match="withdrawn"):
        registrar.enrol(early, "ada", csr_der(owner, "ada"))
    fresh = token(only_for="ada", uses=2)
    with pytest.raises(CertificateRefused, match="the device with this key"):
        registrar.enrol(fresh, "ada", csr_der(thief, "ada"))
    pem = registrar.enrol(fresh, "ada", csr_der(owner, "ada"))
    assert registrar.caller(fingerprint_of(pem)).name == "ada"
    with pytest.raises(CertificateRefused, match="was revoked by the operator"):
        registrar.caller(fingerprint_of(stolen))
    with pytest.raises(CertificateRefused, match="the device with this key"):
        registrar.enrol(several, "bob", csr_der(thief, "bob"))
    with pytest.raises(NameTaken):  # the name has an owner again
        registrar.enrol(fresh, "ada", csr_der(new_key(), "ada"))
    assert [(device.name[:12], device.revoked) for device in store.devices()] == [("ada", False), ("ada.revoked-", True)]
