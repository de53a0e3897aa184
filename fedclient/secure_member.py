"""The device's side of an attempt: which messages of the server it answers, and which it refuses.

The caller makes the returned state durable before it sends the answer. So a device masks one vector with one set of keys, and
answers one set of survivors in a round, whatever the server asks and whenever either side restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec.structs import replace as changed

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import SecureMember, SecureMessage
from attune.common.identity.credential import Credential
from attune.common.protocol import MOST_MEMBERS, SPARE
from attune.common.secure import masks
from attune.common.secure.masks import SHARE_BYTES
from attune.common.secure.statements import (
    Occasion,
    certificate_der,
    check_lifetimes,
    check_signed,
    cohort_digest,
    keys_statement,
    lifetime_of,
    signed,
    survivors_statement,
)
from attune.fedclient.sum_book import SumBook


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


LEAST_DEVICES = 3  # no plan and no server makes a device hand in to a sum of fewer


class MemberState(msgspec.Struct, frozen=True, omit_defaults=True):
    """Facts that a device keeps of the attempt that it takes part in.

    Attributes:
        vector: Digest of what is masked with the attempt's keys.
        root: All secrets of the attempt follow from it.
        key_pem: Private key with which the device signs during the attempt, beside `certificate_pem`.
        members: The cohort, with their signed keys, in the order of names.
        sealed: Pair of shares for this device, from each device that has shared its secrets.
        survivors: The devices whose updates are summed, once this device has been asked about them.
        answered: The newest round in which it was.
    """

    order_id: str = ""
    round: int = 0
    attempt: int = 0
    vector: str = ""
    root: bytes = b""
    key_pem: bytes = b""
    certificate_pem: bytes = b""
    threshold: int = 0
    members: tuple[SecureMember, ...] = ()
    sealed: dict[str, bytes] = {}
    survivors: tuple[str, ...] = ()
    answered: int = 0


@dataclass(frozen=True)
class MaskableOrder:
    """The finished order whose update the device can hand in.

    Attributes:
        order_id: The order.
        round: Its round.
        vector: Digest of that update, before it is masked.
        start: Digest of what was served, from which it follows; empty: it follows from no start.
        book: The sums in which this device was before.
        samples: Start of sums over samples that are handed in beside; empty: there are none.
    """

    order_id: str
    round: int
    vector: str
    start: str = ""
    book: SumBook = field(default_factory=SumBook)
    samples: str = ""

    @property
    def starts(self) -> tuple[str, ...]:
        """All that it follows from."""
        return (self.start, self.samples) if self.samples else (self.start,)


class Participant:
    """One device in the attempts of a run.

    Args:
        name: The device.
        credential: Its key and certificate.
        authority_pem: The authority whose certificates the other devices must have.
        federation: Its fingerprint, as in the plan.
        run: The name of the run.
        minimum: The plan's fewest devices in a sum.
        spare: The plan's devices in a sum beyond the threshold.
        same_cohort: Whether the plan has all sums over the devices of the first one.
    """

    def __init__(
        self,
        name: str,
        credential: Credential,
        authority_pem: bytes,
        federation: str,
        run: str,
        minimum: int,
        spare: int = SPARE,
        same_cohort: bool = False,
    ) -> None:
        self._name, self._credential, self._authority_pem = name, credential, authority_pem
        self._federation, self._run, self._minimum = federation, run, max(LEAST_DEVICES, minimum)
        self._spare, self.same_cohort = max(SPARE, spare), same_cohort
        self._secrets: AttemptSecrets | None = None  # those of the present attempt

    def answer(self, state: MemberState, message: SecureMessage, trained: MaskableOrder) -> tuple[MemberState, SecureMessage]:
        """Return the state to keep, and then the answer to send. To "masked" the answer is the masked update instead.

        Raises:
            UpdateRefused: The device must not answer this.
        """
        if message.order_id != trained.order_id:
            raise UpdateRefused(f"secure aggregation of {message.order_id[:80]!r}, which is not this device's finished order")
        if message.exchange == "keys":
            state = self._begun(state, message, trained)
        elif (message.order_id, message.attempt, trained.vector) != (state.order_id, state.attempt, state.vector):
            raise UpdateRefused(f"attempt {message.attempt} of round {trained.round} is none for which this device has keys")
        # The others could sum what it has masked with any part of them. So it masks only if all who could be in the sum may be.
        for start in trained.starts if message.exchange != "keys" else ():
            if why := trained.book.refuses(start, {member.name for member in message.members}, self.same_cohort):
                raise UpdateRefused(why)
        answers = {
            "keys": self._keys,
            "shares": self._shares,
            "masked": self._masked,
            "survivors": self._survivors,
            "unmasking": self._unmasking,
        }
        state, members = answers[message.exchange](state, message)
        return state, SecureMessage(message.order_id, message.attempt, message.exchange, tuple(members))

    def _begun(self, state: MemberState, message: SecureMessage, trained: MaskableOrder) -> MemberState:
        """Return the state of the message's attempt, with new keys if the attempt is new."""
        if (message.order_id, message.attempt, trained.vector) == (state.order_id, state.attempt, state.vector):
            return state
        if trained.round <= state.answered:
            raise UpdateRefused(f"round {state.answered} is summed already; this device hands in to no other sum of it")
        if message.order_id == state.order_id and message.attempt <= state.attempt:
            raise UpdateRefused(f"attempt {message.attempt} of round {trained.round} is over; the last was {state.attempt}")
        return MemberState(
            message.order_id,
            trained.round,
            message.attempt,
            trained.vector,
            masks.new_root(),
            self._credential.key_pem,
            self._credential.certificate_pem,
            answered=state.answered,
        )

    def _secrets_of(self, state: MemberState) -> AttemptSecrets:
        if self._secrets is None or self._secrets.root != state.root:
            occasion = Occasion(self._federation, self._run, state.round, state.attempt)
            self._secrets = AttemptSecrets(self._name, state.root, occasion)
        return self._secrets

    def _entry(self, state: MemberState) -> SecureMember:
        """Return this device's keys and certificate."""
        certificate = certificate_der(Credential(state.key_pem, state.certificate_pem))
        return SecureMember(self._name, *self._secrets_of(state).public_keys, certificate)

    def _signed(self, state: MemberState, statement: bytes) -> bytes:
        return signed(statement, Credential(state.key_pem, state.certificate_pem))

    def _keys(self, state: MemberState, message: SecureMessage) -> tuple[MemberState, Sequence[SecureMember]]:
        entry = self._entry(state)
        statement = keys_statement(self._secrets_of(state).occasion, entry)
        return state, [changed(entry, signature=self._signed(state, statement))]

    # --- exchange 2: the cohort is fixed, and each device shares its secrets

    def _shares(self, state: MemberState, message: SecureMessage) -> tuple[MemberState, Sequence[SecureMember]]:
        if state.members and (state.members, state.threshold) != (message.members, message.threshold):
            raise UpdateRefused(f"the server names two cohorts for attempt {state.attempt} of round {state.round}")
        if not state.members:
            self._check_cohort(state, message)
            state = changed(state, members=message.members, threshold=message.threshold)
        secrets, shares = self._secrets_of(state), masks.shares_of(state.root, state.threshold, len(state.members))
        cohort = cohort_digest(state.members, state.threshold)
        return state, [
            SecureMember(member.name, secret=secrets.sealed(pair, member, cohort))
            for member, pair in zip(state.members, shares, strict=True)
        ]

    def _check_cohort(self, state: MemberState, message: SecureMessage) -> None:
        """Check the list of the cohort, without trust in the server.

        Raises:
            UpdateRefused: It is too short or too long, has a device twice or without a signature, or not this one's keys.
        """
        members, names = message.members, [member.name for member in message.members]
        if not len(members) < 2 * message.threshold <= 2 * len(members) or len(members) > MOST_MEMBERS:
            raise UpdateRefused(f"a cohort of {len(members)} devices with the threshold {message.threshold} protects nobody")
        self._check_number(len(members), message.threshold)
        if names != sorted(set(names)):
            raise UpdateRefused("the cohort's list has a device twice, or is not in order")
        mine, entry = self._entry(state), {member.name: member for member in members}.get(self._name, SecureMember(""))
        if (entry.mask_key, entry.share_key, entry.certificate) != (mine.mask_key, mine.share_key, mine.certificate):
            raise UpdateRefused("the cohort's list does not have this device's keys")
        check_lifetimes({member.name: lifetime_of(member, self._authority_pem) for member in members})
        occasion = self._secrets_of(state).occasion
        keys: list[list[object]] = [
            [check_signed(member, member.signature, keys_statement(occasion, member)) for member in members],
            [member.mask_key for member in members],
            [member.share_key for member in members],
        ]
        if any(len(set(listed)) < len(members) for listed in keys):
            raise UpdateRefused("the cohort's list has one device under two names")

    def _check_number(self, count: int, threshold: int) -> None:
        least = max(self._minimum, threshold + self._spare)  # as many as the threshold could be colluders and one other
        if count < least:
            raise UpdateRefused(f"a sum over {count} devices is asked for; this device hands in to sums of at least {least}")

    # --- exchange 3: masks with every device that has shared its secrets

    def _masked(self, state: MemberState, message: SecureMessage) -> tuple[MemberState, Sequence[SecureMember]]:
        sealed = {member.name: member.secret for member in message.members}
        if state.sealed and state.sealed != sealed:
            raise UpdateRefused(f"the server names two sets of masks for attempt {state.attempt} of round {state.round}")
        if not state.sealed:
            self._check_names(state, message.members, {member.name for member in state.members}, "has shared secrets")
            state = changed(state, sealed=sealed)
            self._shares_from(state)
        return state, []

    def _check_names(self, state: MemberState, members: Sequence[SecureMember], among: set[str], what: str) -> None:
        names = [member.name for member in members]
        if len(set(names)) < len(names) or not set(names) <= among or self._name not in names:
            raise UpdateRefused(f"the list of who {what} has a device twice, a stranger, or not this device")
        self._check_number(len(names), state.threshold)

    def _shares_from(self, state: MemberState) -> dict[str, bytes]:
        """Return the pairs of shares that devices have sealed for this one, or that this one keeps of itself, by name.

        All of them were shown this device's cohort: else some could share their keys with devices that it does not know.
        """
        secrets, members = self._secrets_of(state), {member.name: member for member in state.members}
        cohort = cohort_digest(state.members, state.threshold)
        return {name: secrets.opened(sealed, members[name], cohort) for name, sealed in state.sealed.items()}

    def seeds(self, state: MemberState) -> list[tuple[bytes, bool]]:
        """Return the seed of each mask of this device, and whether the mask is subtracted."""
        keys = {member.name: member.mask_key for member in state.members if member.name in state.sealed}
        others = {name: key for name, key in keys.items() if name != self._name}
        secrets = self._secrets_of(state)
        pairs = masks.pair_masks(self._name, secrets.mask_key, others, secrets.occasion.context)
        return [(masks.self_seed(state.root), False), *pairs]

    # --- exchange 4: the survivors are fixed, signed, and unmasked

    def _fixed(self, state: MemberState, members: Sequence[SecureMember]) -> MemberState:
        """Return the state with these survivors, which are the only ones of the round from now on."""
        names = tuple(sorted(member.name for member in members))
        if state.survivors == names:
            return state
        if state.survivors:
            raise UpdateRefused(f"the server names two sets of survivors in round {state.round}")
        self._check_names(state, members, set(state.sealed), "is summed")
        return changed(state, survivors=names, answered=state.round)

    def _survivors(self, state: MemberState, message: SecureMessage) -> tuple[MemberState, Sequence[SecureMember]]:
        state = self._fixed(state, message.members)
        statement = survivors_statement(self._secrets_of(state).occasion, list(state.survivors))
        return state, [SecureMember(self._name, signature=self._signed(state, statement))]

    def _unmasking(self, state: MemberState, message: SecureMessage) -> tuple[MemberState, Sequence[SecureMember]]:
        """Return a share of each device: of its self mask if it is in the sum, else of its pair masks. Never both.

        A device that was away when the others signed is asked for the first time here.
        """
        state = self._fixed(state, message.members)
        statement = survivors_statement(self._secrets_of(state).occasion, list(state.survivors))
        members, signed_by = {member.name: member for member in state.members}, [m for m in message.members if m.signature]
        if len(signed_by) < state.threshold:
            raise UpdateRefused(f"{len(signed_by)} devices have signed the survivors; {state.threshold} must")
        for member in signed_by[: state.threshold]:
            check_signed(members[member.name], member.signature, statement)
        shares = []
        for name, pair in self._shares_from(state).items():
            kept = pair[:SHARE_BYTES] if name in state.survivors else pair[SHARE_BYTES:]
            shares.append(SecureMember(name, secret=kept))
        return state, shares
