"""A cohort of devices that do secure aggregation with a server, all in memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from datetime import datetime, timedelta, timezone
from functools import cache

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from attune.common.exchange.messages import SecureMessage
from attune.common.identity.certificates import AUTHORITY, CLIENT, Lifetime, authority_certificate, leaf_certificate, subject
from attune.common.identity.credential import Credential, key_pem
from attune.common.secure.masks import total_mask
from attune.common.secure.statements import Occasion
from attune.fedclient.secure_member import MaskableOrder, MemberState, Participant
from attune.fedserver.core.collector import CohortRule, Collector

FEDERATION, RUN, SIZE = "fed", "first", 5
NAMES = ("ada", "bo", "cy", "dan", "eva", "flo")


class Authority:
    """An authority with its key."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        certificate = authority_certificate(self.key.public_key(), self.key)
        self.pem = certificate.public_bytes(Encoding.PEM)

    def credential(
        self, name: str, key: ec.EllipticCurvePrivateKey | None = None, days: float = 1.0, since: float = -2.0
    ) -> Credential:
        """Return a credential that is valid from `since` to `days` days from now."""
        key = key or ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(timezone.utc)
        life = Lifetime(now + timedelta(days=since), now + timedelta(days=days))
        certificate = leaf_certificate(key.public_key(), subject(name), CLIENT, life, issuer=AUTHORITY, signer=self.key)
        return Credential(key_pem(key), certificate.public_bytes(Encoding.PEM))


@cache
def the_authority() -> Authority:
    return Authority()


@cache
def credential_of(name: str) -> Credential:
    return the_authority().credential(name)


def member(name: str, minimum: int = 3) -> Participant:
    return Participant(name, credential_of(name), the_authority().pem, FEDERATION, RUN, minimum)


class Cohort:
    """Devices with vectors, and the server's side of one attempt."""

    def __init__(self, names: Collection[str] = NAMES, minimum: int = 3, attempt: int = 1, round_: int = 7) -> None:
        self.round = round_
        self.minimum = minimum
        self.trained = {name: MaskableOrder(f"train-{round_}-{name}", round_, f"vector of {name}") for name in names}
        self.members = {name: member(name, minimum) for name in names}
        self.states = dict.fromkeys(names, MemberState())
        draw = np.random.default_rng(3)
        self.vectors = {name: draw.integers(-(1 << 20), 1 << 20, SIZE).astype(np.int32) for name in names}
        self.blobs: dict[str, np.ndarray] = {}
        self.begin(attempt)

    def begin(self, attempt: int) -> None:
        occasion = Occasion(FEDERATION, RUN, self.round, attempt)
        orders = {name: trained.order_id for name, trained in self.trained.items()}
        self.server = Collector(occasion, orders, CohortRule(tuple(sorted(self.members)), self.minimum))

    def ask(self, name: str, change: Callable[[SecureMessage], SecureMessage] = lambda message: message) -> SecureMessage:
        """Let a device answer the server's present request, perhaps changed on the way."""
        self.states[name], answer = self.members[name].answer(
            self.states[name], change(self.server.request(name)), self.trained[name]
        )
        return answer

    def exchange(self, answering: Collection[str] | None = None) -> None:
        """Carry one exchange out, with the answers of these devices alone."""
        for name in sorted(self.server.pending):
            if answering is not None and name not in answering:
                continue
            answer = self.ask(name)
            if self.server.exchange == "masked":
                self.blobs[name] = self.masked(name)
                self.server.masked(name)
            else:
                self.server.take(name, answer)

    def masked(self, name: str) -> np.ndarray:
        mask = total_mask(self.members[name].seeds(self.states[name]), "shared", 0, SIZE)
        return self.vectors[name].view(np.uint32) + mask

    def total(self) -> np.ndarray:
        """Return the sum that the server makes at the end."""
        fixed, unmasking = self.server.fixed, self.server.unmasking()
        assert fixed is not None
        total = unmasking.mask("shared", 0, SIZE)
        for name in fixed.survivors:
            total = total + self.blobs[name]
        return total.view(np.int32)

    def plain(self, names: Collection[str]) -> np.ndarray:
        return np.sum([self.vectors[name] for name in names], axis=0, dtype=np.int32)

    def copy(self) -> Cohort:
        twin = copy.copy(self)
        twin.server, twin.states, twin.blobs = copy.deepcopy(self.server), dict(self.states), dict(self.blobs)
        return twin

    def until(self, exchange: str) -> Cohort:
        """Go on, with every device, until the server is in this exchange."""
        while self.server.exchange != exchange:
            self.exchange()
            self.server.advance()
        return self
