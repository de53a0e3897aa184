"""Secure aggregation on a device: the server's messages answered in order, each answer durable before it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from attune.common.errors import HomeMismatch, SettingError, UpdateRefused
from attune.common.exchange.messages import SecureMember, SecureMessage
from attune.common.exchange.registry import SecureSumSettings, secure_sum_in
from attune.common.faults import fail_at
from attune.common.identity.certificates import subject
from attune.common.identity.credential import Credential, load_certificate
from attune.common.methods.method import SOLVED
from attune.common.plan import FEWEST_DEVICES, Plan
from attune.common.protocol import OTHER_COHORT
from attune.common.text import clean, from_json
from attune.common.wire.blobs import Buffer
from attune.common.wire.digest import digest_of
from attune.fedclient.gate import report_of
from attune.fedclient.home import Identity
from attune.fedclient.link.port import Link
from attune.fedclient.messages import OrderResult, Part, SendRefused
from attune.fedclient.options import DeviceOptions
from attune.fedclient.secure_member import MaskableOrder, MemberState, Participant
from attune.fedclient.store import Store
from attune.fedclient.sum_book import OF_SAMPLES, SumBook, digest_of_text
from attune.fedclient.work.worker import LearnerSlot, Worker

if TYPE_CHECKING:
    from attune.fedclient.work.orders import OrderStore


def exchanges_of(
    plan: Plan, options: DeviceOptions, store: Store, link: Link, worker: Worker, say: Callable[[str], None]
) -> Exchanges | None:
    """Return a device's part in the secure aggregation of a plan; None without it. Errors are those of `signer_of`."""
    settings = secure_sum_in(plan.transforms)
    if settings is None:
        return None
    signer_of(options, link.identity)  # wrong options are told at once
    return Exchanges(plan, settings, lambda: signer_of(options, link.identity), store, link, worker, say)


def signer_of(options: DeviceOptions, identity: Identity) -> Identity:
    """Return the identity with which a device signs, and the authority whose certificates others must have.

    Raises:
        SettingError: One of --authority and --signer is missing, cannot be read, or does not fit to the other.
    """
    if options.authority is None and options.signer is None:
        return identity
    if options.authority is None or options.signer is None:
        raise SettingError("--authority and --signer belong together: the authority, and this device's key and certificate")
    try:
        authority_pem, text = options.authority.read_bytes(), options.signer.read_bytes()
    except OSError as error:
        raise SettingError(f"cannot read {error.filename}: {error.strerror}") from None
    key, begin, rest = text.partition(b"-----BEGIN CERTIFICATE-----")
    signer = Identity(identity.name, Credential(key, begin + rest), authority_pem)
    fits = signer.credential.fits() and signer.credential.issued_by(authority_pem)
    if not fits or load_certificate(signer.credential.certificate_pem).subject != subject(identity.name):
        raise SettingError(
            f"{options.signer} must hold a P-256 key, and its certificate in the name {identity.name} that {options.authority} "
            "has issued"
        )
    return signer


def book_of(store: Store) -> SumBook:
    """Return the sums that a device has answered.

    Raises:
        HomeMismatch: What was kept is damaged.
    """
    text = store.kept("sums")
    try:
        return from_json(text, SumBook) if text else SumBook()
    except msgspec.DecodeError as error:
        raise HomeMismatch(
            f"sums.json in {store.where} is damaged ({error}): restore it from a backup, for without it this device could be "
            "in two sums from one start"
        ) from None


class MaskedParts:
    """Parts of one order behind masks, as the blobs of a hand-in. They are in memory: they can be made again.

    Args:
        who: The device.
        blobs: Bytes by part. Their digests are computed here.
    """

    def __init__(self, who: str, blobs: dict[str, bytearray]) -> None:
        self.who, self._blobs = who, blobs
        self.parts = tuple(Part(name, digest_of(blob), len(blob)) for name, blob in blobs.items())

    def blob(self, order_id: str, part: str) -> Buffer:
        return Buffer(f"the masked {part} of {order_id}", self._blobs[part])


class Exchanges:
    """The part of one device in secure aggregation.

    Args:
        plan: The plan.
        settings: Its settings of secure aggregation.
        signer: Returns the present identity, as `signer_of`: certificates are renewed.
        store: Keeps the sums that the device has answered.
        link: The way to the server.
        worker: Computes masks.
        say: Prints a line for the device's user.
    """

    def __init__(
        self,
        plan: Plan,
        settings: SecureSumSettings,
        signer: Callable[[], Identity],
        store: Store,
        link: Link,
        worker: Worker,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._settings, self._signer = plan, settings, signer
        self._store, self._link, self._worker, self._say = store, link, worker, say
        self._turn = asyncio.Lock()
        self._sending: set[tuple[str, int]] = set()
        self._participant: tuple[Identity, Participant] | None = None

    def _member(self) -> Participant:
        """Return the participant with the present identity; the one of the message before, while that is the same."""
        identity, plan = self._signer(), self._plan
        if self._participant is None or self._participant[0] != identity:
            of, least = (identity.name, identity.credential, identity.ca_pem), (self._settings.devices, self._settings.spare)
            least = (max(least[0], FEWEST_DEVICES if self._settings.exact else 0), least[1])
            member = Participant(*of, plan.federation, plan.run, *least, self._settings.same_cohort)
            self._participant = identity, member
        return self._participant[1]

    async def answer(self, message: SecureMessage, slot: LearnerSlot) -> None:
        """Answer one message of the server, or say why not.

        Raises:
            DiskFull: The answer cannot be made durable.
            HomeMismatch: What was kept is damaged.
        """
        async with self._turn:  # in the order in which they came
            orders, result = slot.orders, slot.newest
            try:
                book = await self._worker.do(book_of, self._store)
                state, answer = await self._worker.do(self._answered, orders, message, _trained(result, book))
            except UpdateRefused as refusal:
                self._say(f"takes no part in secure aggregation: {refusal}")
                cohort = book.cohorts[-1] if str(refusal).startswith(OTHER_COHORT) else ()
                refused = SecureMessage(message.order_id, message.attempt, message.exchange, refused=str(refusal))
                self._link.answer(replace(refused, members=tuple(map(SecureMember, cohort))))
                return
        if result is not None and message.exchange == "masked":
            await self._hand_in(orders, result, state)
        else:
            self._link.answer(answer)

    def _answered(
        self, orders: OrderStore, message: SecureMessage, trained: MaskableOrder
    ) -> tuple[MemberState, SecureMessage]:
        before = _kept(orders)
        state, answer = self._member().answer(before, message, trained)
        if state.survivors and state.answered != before.answered:
            book = trained.book
            for start in trained.starts:
                book = book.noting(start, state.survivors, self._settings.same_cohort)
            self._store.keep("sums", msgspec.json.encode(book))
        if state != before:
            orders.keep_secure_state(msgspec.json.encode(state))
        fail_at(orders.who, trained.round, f"secure-{message.exchange}")
        return state, answer

    async def _hand_in(self, orders: OrderStore, result: OrderResult, state: MemberState) -> None:
        """Hand the masked update in. It has the same bytes whenever this is done again."""
        from attune.fedclient.link.transfer import send

        if (key := (state.order_id, state.attempt)) in self._sending:
            return
        self._sending.add(key)
        try:
            masked = await self._worker.do(self._masked, orders, result, state)
            report = msgspec.structs.replace(report_of(result), parts=masked.parts)
            sent = await send(self._link, masked, report, True, self._say, state.attempt)
        finally:
            self._sending.discard(key)
        if isinstance(sent, SendRefused):
            self._say(f"THE SERVER REFUSED THIS MASKED UPDATE: {clean(sent.reason)}")

    def _masked(self, orders: OrderStore, result: OrderResult, state: MemberState) -> MaskedParts:
        from attune.common.secure.secure_sum import masked

        seeds, order_id = self._member().seeds(state), result.order_id
        return MaskedParts(
            orders.who, {part.part: masked(part.part, orders.blob(order_id, part.part), seeds) for part in result.parts}
        )


def _trained(result: OrderResult | None, book: SumBook) -> MaskableOrder:
    if result is None or not result.trained:
        return MaskableOrder("", 0, "")
    vector = " ".join(f"{part.part}={part.digest}" for part in result.parts)
    served = {part.part: result.served.get(part.part, "") for part in result.parts if part.part != SOLVED}
    samples = "".join(f"{OF_SAMPLES}{part.digest}" for part in result.parts if part.part == SOLVED)
    start = digest_of_text(msgspec.json.encode(served, order="sorted"))
    if result.of_samples:
        start = f"{OF_SAMPLES}{vector}"
    return MaskableOrder(result.order_id, result.round, vector, start, book, samples)


def _kept(orders: OrderStore) -> MemberState:
    text = orders.secure_state()
    try:
        return from_json(text, MemberState) if text else MemberState()
    except msgspec.DecodeError as error:
        raise HomeMismatch(
            f"secure.json in {orders.where} is damaged ({error}): delete it, and this device takes no part in the present round"
        ) from None
