"""Join tokens: their content, the values that both sides derive, and wrong tokens."""

import base64
import hmac
import string

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from attune.common.errors import FingerprintMismatch, TokenRefused
from attune.common.identity.credential import fingerprint_of, load_certificate, load_key, short_form
from attune.common.identity.token import JoinToken
from attune.fedserver.identity.authority import Authority

# The generator of P-256, compressed (SP 800-186, 3.2.1.3): a published point.
GENERATOR = bytes.fromhex("036b17d1f2e12c4247f8bce6e563a440f277037d812deb33a0f4a13945d898c296")
URL_ALPHABET = string.ascii_letters + string.digits + "-_"


def test_layout_is_id_secret_key_in_76_characters() -> None:
    token = JoinToken(bytes(range(8)), bytes(range(8, 24)), GENERATOR)
    text = token.encode()
    assert len(text) == 76
    assert base64.urlsafe_b64decode(text) == bytes(range(24)) + GENERATOR
    assert JoinToken.parse(f"  {text}\n") == token


@given(st.binary(min_size=8, max_size=8), st.binary(min_size=16, max_size=16))
def test_both_sides_derive_the_same_bytes(id_: bytes, secret: bytes) -> None:
    token = JoinToken(id_, secret, GENERATOR)
    other_side = JoinToken.parse(token.encode())
    assert other_side.bootstrap() == token.bootstrap()


def test_the_derivation_never_changes() -> None:
    # A server and a device of different versions must agree, so this value is part of the protocol.
    fingerprint = fingerprint_of(JoinToken(bytes(8), bytes(16), GENERATOR).bootstrap().certificate_pem)
    assert fingerprint == "0b46d6eb234329c54f1bc455038620a715448e4c690e0b86d224b71a1fc46472"


def test_the_key_follows_rfc_5869() -> None:
    token = JoinToken(bytes(range(8)), bytes(range(16)), GENERATOR)
    pseudorandom = hmac.digest(token.id, token.secret, "sha256")
    block, output = b"", b""
    for counter in (1, 2):
        block = hmac.digest(
            pseudorandom, block + b"attune join token 1: bootstrap key" + GENERATOR + bytes([counter]), "sha256"
        )
        output += block
    # The order of P-256's group, as 2^256 - 2^224 + 2^192 - a rest (SP 800-186 gives it in full).
    order = 2**256 - 2**224 + 2**192 - 0x4319055258E8617B0C46353D039CDAAF
    expected = int.from_bytes(output[:48], "big") % (order - 1) + 1
    assert load_key(token.bootstrap().key_pem).private_numbers().private_value == expected


def test_id_secret_and_authority_each_change_the_key() -> None:
    other = ec.derive_private_key(2, ec.SECP256R1()).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)
    tokens = [
        JoinToken(bytes(8), bytes(16), GENERATOR),
        JoinToken(b"\1" + bytes(7), bytes(16), GENERATOR),
        JoinToken(bytes(8), b"\1" + bytes(15), GENERATOR),
        JoinToken(bytes(8), bytes(16), other),
    ]
    assert len({token.bootstrap().key_pem for token in tokens}) == 4


def test_bootstrap_certificate_can_open_a_connection_and_nothing_else() -> None:
    credential = JoinToken.new(GENERATOR).bootstrap()
    extensions = load_certificate(credential.certificate_pem).extensions
    assert credential.fits()
    constraints = extensions.get_extension_for_class(x509.BasicConstraints)
    usage = extensions.get_extension_for_class(x509.KeyUsage)
    purposes = extensions.get_extension_for_class(x509.ExtendedKeyUsage)
    assert constraints.critical and usage.critical and purposes.critical
    assert not constraints.value.ca
    assert usage.value.digital_signature and not usage.value.key_cert_sign and not usage.value.crl_sign
    assert list(purposes.value) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_trust_anchor_stands_for_the_authority_without_its_key(authority: Authority) -> None:
    anchor_pem = JoinToken.new(authority.public_key_compressed).trust_anchor_pem()
    anchor, certificate = load_certificate(anchor_pem), load_certificate(authority.certificate_pem)
    assert anchor.subject == certificate.subject
    assert anchor.public_key() == certificate.public_key()
    assert short_form(anchor_pem) == authority.short_fingerprint
    assert fingerprint_of(anchor_pem) != authority.fingerprint


def test_a_token_checks_the_authority_that_enrolment_returns(authority: Authority, stranger: Authority) -> None:
    token = JoinToken.new(authority.public_key_compressed)
    token.check_authority(authority.certificate_pem)
    with pytest.raises(FingerprintMismatch, match=stranger.short_fingerprint):
        token.check_authority(stranger.certificate_pem)


def test_new_tokens_differ_and_never_look_like_a_flag() -> None:
    texts = [JoinToken.new(GENERATOR).encode() for _ in range(500)]
    assert len(set(texts)) == 500
    assert not [text for text in texts if text.startswith("-")]


def test_the_secret_stays_out_of_logs() -> None:
    token = JoinToken(bytes(8), b"0123456789abcdef", GENERATOR)
    assert "0123456789abcdef" not in repr(token)
    assert repr(load_key(token.bootstrap().key_pem).private_numbers().private_value) not in repr(token.bootstrap())
    assert "PRIVATE KEY" not in repr(token.bootstrap())


GOOD = JoinToken(bytes(8), bytes(16), GENERATOR).encode()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "0 characters instead of 76"),
        (GOOD[:-1], "75 characters instead of 76"),
        (GOOD + "A", "77 characters instead of 76"),
        (GOOD[:-1] + "=", "characters that no token has"),
        (GOOD[:-1] + "+", "characters that no token has"),
        (GOOD[:40] + "\n" + GOOD[41:], "characters that no token has"),
        (GOOD[:-1] + "é", "characters that no token has"),
        (GOOD[:32] + "A" * 44, "names no authority's key"),
        # Marker of an uncompressed point, then an abscissa that no point has.
        (base64.urlsafe_b64encode(bytes(24) + b"\x04" + GENERATOR[1:]).decode(), "names no authority's key"),
        (base64.urlsafe_b64encode(bytes(24) + b"\x02" + b"\xff" * 32).decode(), "names no authority's key"),
    ],
)
def test_each_kind_of_damage_is_named(text: str, reason: str) -> None:
    with pytest.raises(TokenRefused, match=reason):
        JoinToken.parse(text)


MISTYPED = st.builds(lambda at, letter: GOOD[:at] + letter + GOOD[at + 1 :], st.integers(0, 75), st.sampled_from(URL_ALPHABET))


@given(st.text(max_size=100) | st.text(alphabet=URL_ALPHABET, min_size=76, max_size=76) | MISTYPED)
def test_any_text_is_a_token_or_refused(text: str) -> None:
    try:
        token = JoinToken.parse(text)
    except TokenRefused:
        return
    assert token.encode() == text.strip()
    assert token.bootstrap().fits()
