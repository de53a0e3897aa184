"""Statistics of a device's data in a masked sum with other devices: at most one sum in the life of its home.

Two sums over different devices, subtracted, would be one device's own statistics. So the device keeps on its disk which sum it
has answered, and hands in to no other one, whatever the server asks and whenever either side restarts.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import SecureMessage, StatisticsReport, StatisticsRequest
from attune.common.faults import fail_at
from attune.common.plan import FEWEST_DEVICES
from attune.common.protocol import STATISTICS_ORDER
from attune.common.secure.masked_sums import ONE_SUM, MaskedLayout, packed, plus_masks
from attune.common.site_statistics import MOST_COLUMNS
from attune.common.text import from_json
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.masked_slots import slots_of
from attune.fedclient.exchanges import signer_of
from attune.fedclient.link.port import Link
from attune.fedclient.options import DeviceOptions
from attune.fedclient.secure_member import MaskableOrder, MemberState, Participant
from attune.fedclient.store import Store
from attune.fedclient.work.worker import Worker

MOST_BYTES = 3 << 20  # of a report; a message of gRPC may have 4 MiB


@dataclass(frozen=True)
class MaskableStatistics:
    """Statistics that the device can mask: their order, the member that masks them, and the number itself."""

    order: MaskableOrder
    member: Participant
    number: bytes


class MaskedDiscloser:
    """The part of one device in a masked sum of statistics.

    Args:
        options: The owner's options.
        shard: The data.
        store: Keeps what the device has answered.
        link: The way to the server.
        worker: Computes sums and masks.
        say: Prints a line for the device's user.
    """

    def __init__(
        self, options: DeviceOptions, shard: LazyShard, store: Store, link: Link, worker: Worker, say: Callable[[str], None]
    ) -> None:
        self._options, self._shard, self._store = options, shard, store
        self._link, self._worker, self._say = link, worker, say
        self._turn = asyncio.Lock()  # messages are answered in the order in which they came
        self._ready: MaskableStatistics | None = None

    async def prepare(self, question: StatisticsRequest) -> None:
        """Make the number of a question, and say that the device can mask it, or why not."""
        async with self._turn:
            try:
                await self._worker.do(self._prepare, question)
                report = StatisticsReport(question.id)
            except UpdateRefused as refusal:
                report = StatisticsReport(question.id, refused=str(refusal))
            self._link.answer(report)

    async def answer(self, message: SecureMessage) -> None:
        """Answer one message of the exchanges, or say why not.

        Raises:
            DiskFull: The answer cannot be made durable.
        """
        async with self._turn:
            reply: SecureMessage | StatisticsReport
            try:
                reply = await self._worker.do(self._answered, message)
            except UpdateRefused as refusal:
                self._say(f"takes no part in a masked sum of statistics: {refusal}")
                reply = SecureMessage(message.order_id, message.attempt, message.exchange, refused=str(refusal))
            self._link.answer(reply)

    def _prepare(self, question: StatisticsRequest) -> None:
        order_id = f"{STATISTICS_ORDER}{question.id}"
        try:
            layout = from_json(question.layout_json, MaskedLayout)
        except msgspec.DecodeError as error:
            raise UpdateRefused(f"the layout of the masked sum cannot be read ({error}): update one of the two") from None
        layout.check(MOST_COLUMNS, MOST_BYTES)
        state = self._state()
        if state.answered and state.order_id != order_id:
            raise UpdateRefused("its statistics are summed already, and it hands in to no other sum of them")
        run = f"statistics {question.id} {layout.digest}"
        if self._ready is not None and self._ready.order.vector.startswith(run):
            return
        number = packed(layout, slots_of(self._shard.load(), layout))
        signer = signer_of(self._options, self._link.identity)
        minimum = max(FEWEST_DEVICES, self._options.privacy.devices)
        member = Participant(signer.name, signer.credential, signer.ca_pem, layout.federation, run, minimum)
        vector = f"{run} {hashlib.sha256(number).hexdigest()}"
        self._ready = MaskableStatistics(MaskableOrder(order_id, ONE_SUM, vector), member, number)

    def _state(self) -> MemberState:
        text = self._store.statistics_state()
        try:
            return from_json(text, MemberState) if text else MemberState()
        except msgspec.DecodeError:
            raise UpdateRefused("what it kept of masked statistics is damaged (statistics.json of its home)") from None

    def _answered(self, message: SecureMessage) -> SecureMessage | StatisticsReport:
        ready = self._ready
        if ready is None:
            raise UpdateRefused("the server has not said what is to be summed")
        before = self._state()
        state, reply = ready.member.answer(before, message, ready.order)
        if state != before:
            self._store.keep_statistics_state(msgspec.json.encode(state))
        if state.answered and not before.answered:
            self._say(f"statistics of the data are in a masked sum of {len(state.survivors)} devices")
        fail_at(self._link.name, 0, f"secure-{message.exchange}")
        if message.exchange != "masked":
            return reply
        return StatisticsReport(message.of_statistics, masked=plus_masks(ready.number, ready.member.seeds(state)))
