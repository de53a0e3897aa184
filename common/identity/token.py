"""Join token: 76 characters that pin the federation's authority and allow the one call that enrols a device.

Server and device derive the same bootstrap certificate from it, byte for byte. The server trusts exactly this certificate
in handshakes while the token is valid, and stores no secret for it.
"""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import dataclass, field

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding

from attune.common.errors import FingerprintMismatch, TokenRefused
from attune.common.identity.certificates import (
    CLIENT,
    FIRST_DAY,
    LAST_DAY,
    Lifetime,
    authority_certificate,
    leaf_certificate,
    subject,
)
from attune.common.identity.credential import Credential, key_pem, load_key, new_key, public_key_of, short_form

ID_BYTES, SECRET_BYTES, KEY_BYTES = 8, 16, 33
LENGTH = (ID_BYTES + SECRET_BYTES + KEY_BYTES) // 3 * 4
_ALPHABET = re.compile(r"[A-Za-z0-9_-]*")
# The order of P-256's group (FIPS 186-5, SP 800-186 section 3.2.1.3).
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_PURPOSE = b"attune join token 1: bootstrap key"


@dataclass(frozen=True)
class JoinToken:
    """Content of a join token.

    Attributes:
        id: 8 bytes. It is not secret and may be logged.
        secret: 16 bytes.
        ca_public_key: The authority's public key, a compressed P-256 point of 33 bytes.
    """

    id: bytes
    secret: bytes = field(repr=False)
    ca_public_key: bytes

    @classmethod
    def new(cls, ca_public_key: bytes) -> JoinToken:
        """Return a new token (128 secret bits) for the authority with this key."""
        while True:
            token = cls(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES), ca_public_key)
            # A command would take a token that begins with '-' for a flag.
            if token.encode()[0].isalnum():
                return token

    @property
    def label(self) -> str:
        """Id for people: 16 hexadecimal digits."""
        return self.id.hex()

    def encode(self) -> str:
        """Return base64url of id, secret and key without padding: 76 characters."""
        return base64.urlsafe_b64encode(self.id + self.secret + self.ca_public_key).decode()

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Return the token in `text`. White space around it is ignored.

        Raises:
            TokenRefused: `text` is no token. The message never repeats the text.
        """
        text = text.strip()
        again = "Copy the whole token that `fedserver token` printed."
        if not _ALPHABET.fullmatch(text):
            raise TokenRefused(f"The join token has characters that no token has (only A-Z a-z 0-9 _ -). {again}")
        if len(text) != LENGTH:
            raise TokenRefused(f"The join token has {len(text)} characters instead of {LENGTH}. {again}")
        data = base64.urlsafe_b64decode(text)
        key = data[ID_BYTES + SECRET_BYTES :]
        try:
            ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), key)
        except ValueError:
            raise TokenRefused(f"The join token is damaged: it names no authority's key. {again}") from None
        return cls(data[:ID_BYTES], data[ID_BYTES : ID_BYTES + SECRET_BYTES], key)

    def bootstrap(self) -> Credential:
        """Return the client credential that allows enrolment and nothing else; equal bytes on both sides.

        It has no expiry date: the server decides how long it trusts it. The subject holds the token's id, for people.
        """
        key = ec.derive_private_key(self._scalar(), ec.SECP256R1())
        name = subject(f"Attune join {self.label}")
        certificate = leaf_certificate(
            key.public_key(), name, CLIENT, Lifetime(FIRST_DAY, LAST_DAY), issuer=name, signer=key, serial=1
        )
        return Credential(key_pem(key), certificate.public_bytes(Encoding.PEM))

    def _scalar(self) -> int:
        # 16 bytes more than the group's order has, so that the remainder is uniform (FIPS 186-5, A.2.1).
        derive = HKDF(hashes.SHA256(), length=48, salt=self.id, info=_PURPOSE + self.ca_public_key)
        return int.from_bytes(derive.derive(self.secret), "big") % (_ORDER - 1) + 1

    def trust_anchor_pem(self) -> bytes:
        """Return the root certificate of a joining device: the authority's name and key, with a throw-away signature."""
        key = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), self.ca_public_key)
        return authority_certificate(key, load_key(new_key())).public_bytes(Encoding.PEM)

    def check_authority(self, ca_pem: bytes) -> None:
        """Check that `ca_pem`, which enrolment returned, is for the key that this token pins.

        Raises:
            FingerprintMismatch: It is for another key.
        """
        if public_key_of(ca_pem) != self.ca_public_key:
            raise FingerprintMismatch(
                f"The server returned an authority ({short_form(ca_pem)}) that is not the one the join token pins. "
                "Do not trust it; ask the operator for a new token."
            )
