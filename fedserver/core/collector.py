"""The server's side of an attempt: what it asks each device, what it takes in, and when the next exchange begins.

Pure: the caller sends, waits and keeps. The survivors are durable before any device is asked about them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property

import msgspec
import numpy as np

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import ExchangeName, FixedSurvivors, SecureMember, SecureMessage
from attune.common.protocol import MOST_MEMBERS, OTHER_COHORT, SPARE, SUMMED_BEFORE
from attune.common.secure import masks
from attune.common.secure.masks import SHARE_BYTES, combine, weights_at_zero
from attune.common.secure.statements import (
    CERTIFICATE_BYTES,
    SIGNATURE_BYTES,
    Occasion,
    check_signed,
    keys_statement,
    survivors_statement,
)

AFTER: dict[ExchangeName, ExchangeName] = {
    "keys": "shares",
    "shares": "masked",
    "masked": "survivors",
    "survivors": "unmasking",
}


class Unmasking(msgspec.Struct, frozen=True, dict=True):
    """Secrets that take the masks off a sum.

    Attributes:
        context: Context of the attempt.
        selves: Seeds of the survivors' self masks.
        gone: Pair seeds of the devices that are not in the sum, but whose masks are.
        keys: The survivors' public mask keys.
    """

    context: bytes
    selves: dict[str, bytes]
    gone: dict[str, bytes]
    keys: dict[str, bytes]

    @cached_property
    def seeds(self) -> list[tuple[bytes, bool]]:
        """The seed of each mask to add to the sum, and whether it is subtracted instead."""
        seeds = [(seed, True) for seed in self.selves.values()]
        for name, seed in self.gone.items():
            # What a survivor subtracts, this device would have added.
            seeds += masks.pair_masks(name, masks.mask_key(seed), self.keys, self.context)
        return seeds

    def mask(self, part: str, tensor: int, size: int) -> np.ndarray:
        """Return what must be added to the sum of one tensor, (size,) uint32, modulo 2^32."""
        return masks.total_mask(self.seeds, part, tensor, size)


class CohortRule(msgspec.Struct, frozen=True):
    """How many devices a sum needs.

    Attributes:
        asked: The cohort, from which the threshold follows.
        minimum: The fewest devices that the settings allow.
        spare: Devices beyond the threshold: if one fewer than the threshold collude, so many and one more do not.
        all_of_them: Whether the sum must be over the whole cohort.
    """

    asked: tuple[str, ...]
    minimum: int
    spare: int = SPARE
    all_of_them: bool = False

    @property
    def threshold(self) -> int:
        """The fewest devices that can unmask: more than half of those that were asked."""
        return len(self.asked) // 2 + 1

    @property
    def least(self) -> int:
        """The fewest devices in a sum."""
        return len(self.asked) if self.all_of_them else max(self.threshold + self.spare, self.minimum)


class Collector:
    """One attempt of a round.

    Args:
        occasion: The attempt.
        orders: The order of each device.
        rule: How many devices it needs.
        fixed: Survivors of an attempt that a restarted server goes on with; None: a new one.

    Raises:
        UpdateRefused: There are too many devices, or too few.
    """

    def __init__(
        self, occasion: Occasion, orders: Mapping[str, str], rule: CohortRule, fixed: FixedSurvivors | None = None
    ) -> None:
        self.occasion, self._orders, self._rule = occasion, orders, rule
        self.exchange: ExchangeName = "survivors" if fixed else "keys"
        self.asked: tuple[str, ...] = fixed.survivors if fixed else rule.asked
        self.threshold = fixed.threshold if fixed else rule.threshold
        self._fixed = fixed
        self._members: tuple[SecureMember, ...] = fixed.members if fixed else ()
        self._taken: dict[str, tuple[SecureMember, ...]] = {}  # answers to the present exchange
        self._refused: dict[str, str] = {}
        self._sharers: dict[str, dict[str, bytes]] = {}  # device -> for each other one, its sealed shares
        self._signatures: dict[str, bytes] = {}
        self.bound = False  # whether a device was in a sum from this start before
        self.cohorts: dict[str, tuple[str, ...]] = {}  # device -> the devices with which alone it is in sums
        if not fixed:
            if len(rule.asked) > MOST_MEMBERS:
                raise UpdateRefused(f"a round of secure aggregation has at most {MOST_MEMBERS} devices, not {len(rule.asked)}")
            self._check_enough(len(rule.asked), "have trained")

    @property
    def pending(self) -> frozenset[str]:
        """Devices that are asked and have not answered."""
        return frozenset(self.asked) - self._taken.keys() - self._refused.keys()

    @property
    def least(self) -> int:
        """How many answers the present exchange needs."""
        return self.threshold if self.exchange in ("survivors", "unmasking") else self._rule.least

    @property
    def kept_cohort(self) -> tuple[str, ...]:
        """The devices with which most of the cohort are in sums alone, as they say; empty: no such ones."""
        counts = Counter(self.cohorts.values())
        return next((cohort for cohort, count in counts.items() if cohort and count >= self.threshold), ())

    @property
    def refusals(self) -> Mapping[str, str]:
        """Why devices take no part in the rest of the attempt."""
        return self._refused

    @property
    def fixed(self) -> FixedSurvivors | None:
        """Facts to keep before the first device is asked about the survivors; None before that exchange."""
        return self._fixed

    def request(self, name: str) -> SecureMessage:
        """Return what a device is asked in the present exchange."""
        members: Iterable[SecureMember] = ()
        match self.exchange:
            case "shares":
                members = self._members
            case "masked":
                members = (SecureMember(sender, secret=sealed[name]) for sender, sealed in self._sharers.items())
            case "survivors":
                members = map(SecureMember, self.asked)
            case "unmasking":
                survivors = self._fixed.survivors if self._fixed else ()
                members = (SecureMember(n, signature=self._signatures.get(n, b"")) for n in survivors)
        return SecureMessage(self._orders[name], self.occasion.attempt, self.exchange, tuple(members), self.threshold)

    # --- answers

    def take(self, name: str, message: SecureMessage) -> bool:
        """Take an answer in, and return whether it is one to the present exchange. Others are old, and are ignored.

        Raises:
            UpdateRefused: It cannot be an answer; the device takes no part any more.
        """
        fits = (message.order_id, message.attempt, message.exchange) == (
            self._orders.get(name), self.occasion.attempt, self.exchange,
        )  # fmt: skip
        if not fits or name not in self.pending:
            return False
        try:
            if message.refused:
                self.bound |= message.refused.startswith(SUMMED_BEFORE)
                if message.refused.startswith(OTHER_COHORT):
                    self.cohorts[name] = tuple(sorted({member.name for member in message.members}))
                raise UpdateRefused(message.refused)
            self._check(name, message)
        except UpdateRefused as refusal:
            self._refused[name] = str(refusal)
            raise
        self._taken[name] = message.members
        return True

    def masked(self, name: str) -> None:
        """Take note that the device's masked update is durable."""
        if self.exchange == "masked" and name in self.asked:
            self._taken[name] = ()

    def drop(self, name: str, why: str) -> None:
        """Go on without a device."""
        self._refused[name] = why

    def _check(self, name: str, message: SecureMessage) -> None:
        members = {member.name: member for member in message.members}
        expected = {
            "keys": {name},
            "shares": {member.name for member in self._members},
            "masked": {""},  # masked updates do not come as messages
            "survivors": {name},
            "unmasking": set(self._fixed.masked if self._fixed else ()),
        }[self.exchange]
        if members.keys() != expected or len(members) < len(message.members):
            raise UpdateRefused(f"{name} has answered about other devices than it was asked about")
        for member in message.members:
            self._check_member(name, member)

    def _check_member(self, name: str, member: SecureMember) -> None:
        lengths = {"shares": masks.SEALED_BYTES, "unmasking": SHARE_BYTES}
        if len(member.secret) != lengths.get(self.exchange, 0):
            raise UpdateRefused(f"{name} has sent a share of {len(member.secret)} bytes")
        if len(member.certificate) > CERTIFICATE_BYTES or len(member.signature) > SIGNATURE_BYTES:
            raise UpdateRefused(f"{name} has sent a certificate or signature that is too long")
        if self.exchange == "keys":
            if {len(member.mask_key), len(member.share_key)} != {masks.KEY_BYTES}:
                raise UpdateRefused(f"{name} has sent a key of a wrong length")
            check_signed(member, member.signature, keys_statement(self.occasion, member))
        if self.exchange == "survivors":
            known = next(known for known in self._members if known.name == name)
            check_signed(known, member.signature, survivors_statement(self.occasion, list(self.asked)))

    # --- the end of an exchange

    def advance(self) -> None:
        """End the present exchange with the answers that are there, and begin the next.

        Raises:
            UpdateRefused: Too few devices have answered for any sum; it names the exchange.
        """
        match self.exchange:
            case "keys":
                self._check_enough(len(self._taken), "have sent keys")
                self._members = tuple(self._taken[name][0] for name in sorted(self._taken))
                self.asked = tuple(sorted(self._taken))
            case "shares":
                self._check_enough(len(self._taken), "have shared their secrets")
                taken = {name: {m.name: m.secret for m in self._taken[name]} for name in sorted(self._taken)}
                self._sharers = taken
                self.asked = tuple(taken)
            case "masked":
                self._check_enough(len(self._taken), "have handed in")
                self._fixed = FixedSurvivors(self.threshold, self._members, self.asked, tuple(sorted(self._taken)))
                self.asked = self._fixed.survivors
            case "survivors":
                self._check_enough(len(self._taken), "have signed whose updates are summed", self.threshold)
                self._signatures = {name: members[0].signature for name, members in self._taken.items()}
            case "unmasking":
                raise AssertionError("the last exchange ends with `unmasking`")
        self.exchange, self._taken, self._refused = AFTER[self.exchange], {}, {}

    def _check_enough(self, count: int, did: str, least: int = 0) -> None:
        least = least or self._rule.least
        if count < least:
            raise UpdateRefused(
                f"secure aggregation: {count} of {len(self._rule.asked)} devices {did}, and {least} must; no sum is made"
            )

    def unmasking(self) -> Unmasking:
        """Return what takes the masks off the sum.

        Raises:
            UpdateRefused: Too few devices have answered, or their shares do not fit together.
        """
        self._check_enough(len(self._taken), "have unmasked the sum", self.threshold)
        fixed = self._fixed
        assert fixed is not None  # noqa: S101 (`advance` sets it before this exchange)
        numbers = {member.name: number for number, member in enumerate(fixed.members, start=1)}
        helpers = sorted(self._taken)[: fixed.threshold]
        weights = weights_at_zero([numbers[name] for name in helpers])
        shares = {name: {member.name: member.secret for member in self._taken[name]} for name in helpers}
        try:
            secrets = {
                name: combine({numbers[helper]: shares[helper][name] for helper in helpers}, weights) for name in fixed.masked
            }
        except ValueError:
            raise UpdateRefused("secure aggregation: a device has sent a wrong share; no sum is made") from None
        keys = {member.name: member.mask_key for member in fixed.members}
        gone = {name: secret for name, secret in secrets.items() if name not in fixed.survivors}
        if wrong := [name for name, seed in gone.items() if masks.public(masks.mask_key(seed)) != keys[name]]:
            raise UpdateRefused(f"secure aggregation: the shares of {wrong[0]}'s key give another key; no sum is made")
        selves = {name: secrets[name] for name in fixed.survivors}
        return Unmasking(self.occasion.context, selves, gone, {name: keys[name] for name in fixed.survivors})
