"""Statistics of a device's data in a masked sum with other devices: at most one sum in the life of its home.

Two sums over different devices, subtracted, would be one device's own statistics. So the device keeps on its disk which sum it
has answered, and hands in to no other one, whatever the server asks and whenever either side restarts.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable
from fractions import Fraction

import msgspec
import numpy as np
import numpy.typing as npt

from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import SecureMessage, StatisticsReport, StatisticsRequest
from attune.common.faults import fail_at
from attune.common.plan import FEWEST_DEVICES
from attune.common.protocol import STATISTICS_ORDER
from attune.common.secure.masked_sums import ONE_SUM, MaskedLayout, packed, plus_masks
from attune.common.site_statistics import BUCKETS, MOST_COLUMNS
from attune.common.text import from_json
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.shard import Shard
from attune.fedclient.data.site_sums import class_counts, columns_in, feature_names, sketch_of
from attune.fedclient.exchanges import signer_of
from attune.fedclient.link.port import Link
from attune.fedclient.options import DeviceOptions
from attune.fedclient.secure_member import MaskableOrder, MemberState, Participant
from attune.fedclient.store import Store
from attune.fedclient.work.worker import Worker

Values = npt.NDArray[np.float64]


SlotValues = list[int | float | Fraction]


def slots_of(shard: Shard, layout: MaskedLayout) -> SlotValues:
    """Return the slots of a shard.

    Every device of a sum fills every slot: a column that one device alone has would be that device's own.

    Raises:
        UpdateRefused: The shard has other classes, features or targets than the layout, lacks a column, or has no value in one.
    """
    slots: SlotValues = [len(shard.train_x) + len(shard.test_x)]
    if layout.classes:
        if shard.task != "classes" or [str(label) for label in shard.labels] != layout.classes:
            raise UpdateRefused("its classes are not those of the masked sum")
        slots += class_counts(shard)
    columns = columns_in(shard, layout.columns.keys()) if layout.columns else {}
    for name, centre in layout.columns.items():
        values_N = columns.get(name, np.empty(0))
        present = values_N[~np.isnan(values_N)] - centre.mean
        if not len(present):
            raise UpdateRefused(f"its data have no value in the column {name!r} of the masked sum")
        total = exact_sum(present)
        sketch = sketch_of(values_N, centre)
        buckets = np.zeros(2 * BUCKETS + 1, dtype=np.int64)
        buckets[sketch.first + BUCKETS :][: len(sketch.counts)] = sketch.counts
        slots += [len(present), len(values_N) - len(present), total, sum_of_squares(present), total * total / len(present)]
        slots += buckets.tolist()
    features = feature_names(shard) if shard.kind in ("series", "tabular") else []
    targets = list(map(str, shard.labels)) if shard.task == "regression" else []
    slots += _moments(shard.train_x, layout.features, features)
    slots += _moments(shard.train_y, layout.targets, targets)
    return slots


def _moments(part: Array, wanted: list[str], names: list[str]) -> SlotValues:
    """Return the rows of a training part, and for each of its columns the sums of the values and of their squares."""
    if not wanted:
        return [0]
    if wanted != names:
        raise UpdateRefused("its features or targets are not those of the masked sum")
    columns: Values = part.reshape(-1, len(names)).astype(np.float64)
    sums = ((exact_sum(values_N), sum_of_squares(values_N)) for values_N in columns.T)
    return [len(columns), *(number for pair in sums for number in pair)]


def exact_sum(values_N: Values) -> Fraction | float:
    """Return the sum of these numbers, to twice the precision of a float; infinity where it overflows."""
    numbers = values_N.tolist()
    try:
        rough = math.fsum(numbers)
    except OverflowError:
        return math.inf
    return Fraction(rough) + Fraction(math.fsum([*numbers, -rough])) if math.isfinite(rough) else rough


def sum_of_squares(values_N: Values) -> Fraction | float:
    """Return the sum of the squares, as exact as `exact_sum`: a variance stays when the squared mean is subtracted.

    A number is the sum of its 24 leading bits and the rest, so the three products of its square fit into floats.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        leading_N = values_N.astype(np.float32).astype(np.float64)
        leading_N = np.where(np.isfinite(leading_N), leading_N, values_N)
        rest_N = values_N - leading_N
        return exact_sum(np.concatenate([leading_N**2, 2 * leading_N * rest_N, rest_N**2]))


MOST_BYTES = 3 << 20  # of a report; a message of gRPC may have 4 MiB


class MaskableStatistics(msgspec.Struct, frozen=True):
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
        text = self._store.kept("statistics")
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
            self._store.keep("statistics", msgspec.json.encode(state))
        if state.answered and not before.answered:
            self._say(f"statistics of the data are in a masked sum of {len(state.survivors)} devices")
        fail_at(self._link.name, 0, f"secure-{message.exchange}")
        if message.exchange != "masked":
            return reply
        return StatisticsReport(message.of_statistics, masked=plus_masks(ready.number, ready.member.seeds(state)))
