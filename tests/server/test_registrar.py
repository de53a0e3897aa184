"""Who may come in, decided by fingerprints and what the database says now."""

from __future__ import annotations

import pytest

from attune.common.errors import CertificateRefused, Forbidden, NameTaken, SettingError, TokenRefused
from attune.common.identity.credential import Credential, csr_der, fingerprint_of, key_fingerprint_of, new_key
from attune.common.identity.token import JoinToken
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.registrar import OPERATOR, Registrar, install_operator, new_token
from attune.fedserver.stores.sqlite import Store


@pytest.fixture
def authority(tmp_path):
    return Authority.create(tmp_path / "ca")


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "state.sqlite")
    yield made
    made.close()


@pytest.fixture
def registrar(authority, store):
    return Registrar(authority, store, 90.0)


@pytest.fixture
def token(authority, store):
    """Makes tokens; returns the fingerprint of their holder."""

    def make(uses=1, ttl_s=60.0, **more):
        text = new_token(authority.public_key_compressed, store, uses, ttl_s, **more)
        return fingerprint_of(JoinToken.parse(text).bootstrap().certificate_pem)

    return make


def enrol(registrar, holder, name="a", key=None):
    return registrar.enrol(holder, name, csr_der(key or new_key(), "whatever"))


def test_a_token_is_spent_use_by_use_and_says_why_it_ends(registrar, token, store):
    holder = token(uses=2)
    assert registrar.role(holder) == ("bootstrap", "")
    for name in ("a", "b"):
        assert registrar.role(fingerprint_of(enrol(registrar, holder, name))) == ("device", name)
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
    assert registrar.role(fingerprint_of(renewed)) == ("device", "a")
    with pytest.raises(NameTaken):
        enrol(registrar, token(), "a", old_key)


def test_who_is_revoked_or_expired_or_unknown_is_refused(registrar, token, store, authority):
    pem = enrol(registrar, token(), "a")
    store.update_device("a", revoked=1)
    with pytest.raises(CertificateRefused, match="revoked"):
        registrar.role(fingerprint_of(pem))
    with pytest.raises(CertificateRefused, match="revoked"):
        enrol(registrar, token(), "a")
    store.add_certificate("f" * 64, "b", "device", 1.0)
    with pytest.raises(CertificateRefused, match="expired"):
        registrar.role("f" * 64)
    with pytest.raises(Forbidden):
        registrar.role(fingerprint_of(authority.issue_device(csr_der(new_key(), "c"), "c", 1.0)))


def test_only_the_newest_operator_counts(registrar, authority, store, tmp_path):
    install_operator(authority, store, tmp_path)
    old = fingerprint_of(Credential.load(tmp_path, OPERATOR).certificate_pem)
    assert registrar.role(old) == ("operator", "operator")
    install_operator(authority, store, tmp_path)
    with pytest.raises(Forbidden):
        registrar.role(old)


def test_of_one_origin_only_the_newest_tokens_stay(token, store):
    others = token(), token(origin="local", keep=1)
    started = [token(origin="start", keep=2) for _ in range(4)]
    alive = [holder for holder in (*others, *started) if store.token(holder) is not None]
    assert alive == [*others, *started[2:]]


def test_spent_tokens_stay_in_the_handshake_to_hear_why_and_then_go(token, store, registrar):
    holder, expired = token(), token(ttl_s=-5.0)
    assert len(store.bootstrap_roots(store.token(holder)["expires_at"] - 60, 100.0)) == 2
    enrol(registrar, holder, "a")
    used_up_at = store.token(holder)["used_up_at"]
    assert store.bootstrap_roots(used_up_at + 99.0, 100.0) == [store.token(holder)["bootstrap_pem"]]
    assert store.bootstrap_roots(used_up_at + 101.0, 100.0) == []
    assert store.token(expired) is not None
