"""Secrets of a device in one attempt of secure aggregation, each computed once: several exchanges need the same ones."""

from __future__ import annotations

from functools import cached_property

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import SecureMember
from attune.common.secure import masks
from attune.common.secure.sharing import SHARE_BYTES
from attune.common.secure.statements import Occasion


class AttemptSecrets:
    """Keys of one device, and what follows from them and the keys of others.

    Args:
        name: The device.
        root: The random bytes from which all its secrets of the attempt follow.
        occasion: The attempt.
    """

    def __init__(self, name: str, root: bytes, occasion: Occasion) -> None:
        self.root, self.occasion = root, occasion
        self._name = name
        self._agreed: dict[bytes, bytes] = {}  # by the other's public key
        self._opened: dict[tuple[bytes, bytes, bytes], bytes] = {}  # by the sender's key, what it has sealed, and the cohort

    def __repr__(self) -> str:
        return f"AttemptSecrets({self._name!r}, {self.occasion})"

    @cached_property
    def mask_key(self) -> X25519PrivateKey:
        """The key from which masks with other devices follow."""
        return masks.mask_key(masks.pair_seed(self.root))

    @cached_property
    def share_key(self) -> X25519PrivateKey:
        """The key from which the keys of sealed shares follow."""
        return masks.share_key(self.root)

    @cached_property
    def public_keys(self) -> tuple[bytes, bytes]:
        """The public keys of `mask_key` and `share_key`."""
        return masks.public(self.mask_key), masks.public(self.share_key)

    def sealed(self, pair: bytes, receiver: SecureMember, cohort: bytes) -> bytes:
        """Return a pair of this device's shares, encrypted for another device.

        Args:
            pair: The shares.
            receiver: The other device, or this one.
            cohort: Digest of the cohort that this device was shown. One that was shown another cohort cannot open them.

        Raises:
            UpdateRefused: The receiver's key is none.
        """
        return masks.seal(pair, *self._sealing(receiver, self._name, receiver.name, cohort))

    def opened(self, sealed: bytes, sender: SecureMember, cohort: bytes) -> bytes:
        """Return the pair of shares that another device has encrypted for this one, in the same cohort.

        Raises:
            UpdateRefused: It has not, or its key is none.
        """
        known = sender.share_key, sealed, cohort
        if known not in self._opened:
            pair = masks.opened(sealed, *self._sealing(sender, sender.name, self._name, cohort))
            if len(pair) != 2 * SHARE_BYTES:
                raise UpdateRefused(f"the shares of {sender.name} have a wrong length")
            self._opened[known] = pair
        return self._opened[known]

    def _sealing(self, other: SecureMember, sender: str, receiver: str, cohort: bytes) -> tuple[bytes, bytes]:
        """Return the key and the context of what `sender` seals for `receiver`. One is `other`, and one this device."""
        context = msgspec.json.encode([sender, receiver]) + cohort + self.occasion.context
        if other.share_key not in self._agreed:
            self._agreed[other.share_key] = masks.agreed(self.share_key, other.share_key)
        return masks.for_purpose(self._agreed[other.share_key], b"shares " + context), context
