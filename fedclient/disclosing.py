"""Statistics of a device's data on their way to the server: only if its owner discloses them, and beside noise only noisy."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

import msgspec

from attune import DISTRIBUTION
from attune.common.errors import HomeMismatch, SettingError, UpdateRefused
from attune.common.exchange.messages import (
    Description,
    Hello,
    SecureMessage,
    StatisticsReport,
    StatisticsRequest,
    UnitReport,
    Welcome,
)
from attune.common.exchange.registry import SPOKEN_AS, TRANSFORMS
from attune.common.faults import fail_at
from attune.common.plan import FEWEST_DEVICES, MAIN, Plan, Profile
from attune.common.protocol import DESCRIPTION, EMPTY, IN_NO_SUM, MASKED, MASKED_SCALE, SHARES, SPOKEN, STATISTICS_ORDER, SUMS
from attune.common.secure.masked_sums import ONE_SUM, packed, plus_masks
from attune.common.site_statistics import MOST_BYTES, MOST_COLUMNS, Centre, MaskedLayout, NoisyLayout
from attune.common.text import from_json
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.site_sums import site_sketches, site_sums, slots_of, units_of_shard
from attune.fedclient.exchanges import signer_of
from attune.fedclient.gate import Gate
from attune.fedclient.link.port import Link
from attune.fedclient.options import DeviceOptions
from attune.fedclient.secure_member import MaskableOrder, MemberState, Participant
from attune.fedclient.store import Store
from attune.fedclient.work.worker import Worker

T = TypeVar("T")
DESCRIBED_AT_ONCE = 256  # samples
DESCRIBED, REPORT, MASKED_SUM = "Description.moments", "StatisticsReport.report_json", "StatisticsReport.masked"
_version = functools.cache(version)  # it reads a file


def abilities(options: DeviceOptions, profile: Profile) -> tuple[str, ...]:
    """Return what a device can do beside the abilities of its version, because its owner allows it.

    That is statistics in a masked sum, a description of its data, sums over its samples, and its finished network.
    """
    owners = tuple(word for word, kind in ((SUMS, "sums"), (SHARES, "model")) if kind in options.disclose)
    if not {"statistics", "masked-statistics"} & set(options.disclose):
        return owners
    scales = profile.columns is not None or profile.targets is not None
    described = (DESCRIPTION,) if Gate(options).allows(DESCRIBED) else ()
    return (MASKED, *([MASKED_SCALE] if scales else []), *described, *owners)


def hello_of(options: DeviceOptions, shard: LazyShard, empty: bool, in_no_sum: bool = True) -> Hello:
    """Return the first message to the server. It names the transforms of plug-ins too; plans are checked when they come."""
    transforms = (f"{SPOKEN_AS}{name}" for name in TRANSFORMS)
    scales_alone = shard.profile.kind in ("series", "tabular") and shard.profile.columns is None
    in_no_sum = in_no_sum and not scales_alone  # else sums over its samples mean something else than those of others
    variant, tag = msgspec.UNSET if options.variant == MAIN else options.variant, options.tag or msgspec.UNSET
    profile = msgspec.structs.replace(shard.profile, variant=variant, tag=tag)
    now = (word for word, is_so in ((EMPTY, empty), (IN_NO_SUM, in_no_sum)) if is_so)
    can = (*SPOKEN, *transforms, *abilities(options, shard.profile), *now)
    return Hello(f"attune {_version(DISTRIBUTION)}", msgspec.json.encode(Gate(options).profile(profile, shard.declares)), can)


async def tell_units(gate: Gate, shard: LazyShard, link: Link, worker: Worker, say: Callable[[str], None]) -> None:
    """Tell the server, and the person at the device, by a word how columns fit the ranges of the plan's schema.

    Nothing is told if there are no ranges, if training has noise, or if the owner forbids it.
    """
    plan = gate.plan
    if plan is None or plan.schema is None or not gate.allows("UnitReport.verdicts"):
        return
    if all(column.range is None for column in plan.schema.columns.values()):
        return
    verdicts = await worker.do(lambda: units_of_shard(shard.load_for(plan)))
    link.answer(UnitReport(dict(verdicts)))
    for column, verdict in verdicts.items():
        if verdict != "fits":
            say(f"warning: {column} does not fit the schema's range ({verdict}): is its unit the schema's?")


class MaskableStatistics(msgspec.Struct, frozen=True):
    """Statistics that the device can mask: their order, the member that masks them, and the number itself."""

    order: MaskableOrder
    member: Participant
    number: bytes


class Discloser:
    """Discloser of one device's data: answers to questions for statistics, clear, masked or noised, and a description.

    A question for clear or noisy sums that comes during another one is dropped. Masked ones and their exchanges are answered
    in order. The device is in at most one masked sum in the life of its home: two sums over different devices, subtracted,
    would be one device's own statistics. So it keeps on its disk which sum it has answered, and hands in to no other one,
    whatever the server asks and whenever either side restarts.

    Args:
        options: The owner's options.
        shard: The data.
        store: Keeps which masked sum the device has answered.
        link: The way to the server.
        worker: Computes sums and masks.
        say: Prints a line for the device's user.
    """

    def __init__(
        self, options: DeviceOptions, shard: LazyShard, store: Store, link: Link, worker: Worker, say: Callable[[str], None]
    ) -> None:
        self._options, self._shard, self._store = options, shard, store
        self._link, self._worker, self._say = link, worker, say
        self._turn = asyncio.Lock()
        self._ready: MaskableStatistics | None = None
        self._described: tuple[bytes, Description] | None = None  # the plan, and what is said under it

    async def describe(self, gate: Gate, plan_json: bytes) -> None:
        """Tell the server the moments of this device's inputs, if embeddings start from them and the owner allows it."""
        self._described, plan = None, gate.plan
        if plan is None or plan.method_options.get("embedding") != "described" or not Gate(self._options).allows(DESCRIBED):
            return
        said = await self._worker.do(_moments, self._shard, plan) if gate.allows(DESCRIBED) else ()
        self._described = plan_json, Description(said)
        self._link.answer(self._described[1])

    def heard(self, event: object) -> None:
        """Tell it again on a new stream: the server may be another process, which does not know it."""
        if isinstance(event, Welcome) and self._described is not None and event.plan_json == self._described[0]:
            self._link.answer(self._described[1])

    async def answer(self, question: StatisticsRequest, gate: Gate) -> None:
        """Answer a question, or say why not. To one for a masked sum the answer is that the device can mask its numbers."""
        noisy = bool(question.noisy_json)
        masked = bool(question.layout_json) and not noisy  # a question for both is for noise alone
        if why := gate.objection(MASKED_SUM if masked else REPORT, noisy):
            self._link.answer(StatisticsReport(question.id, refused=why))
            return
        if self._turn.locked() and not masked:
            return
        answer = self._noisy_sums if noisy else self._masked_number if masked else self._clear_sums
        async with self._turn:
            try:
                report = StatisticsReport(question.id, await self._worker.do(answer, question, gate.plan))
            except UpdateRefused as refusal:
                report = StatisticsReport(question.id, refused=str(refusal))
            self._link.answer(report)

    async def exchange(self, message: SecureMessage, gate: Gate) -> None:
        """Answer a message of a masked sum, or say why not.

        Raises:
            DiskFull: The answer cannot be made durable.
        """
        if why := gate.objection(MASKED_SUM):
            self._link.answer(SecureMessage(message.order_id, message.attempt, message.exchange, refused=why))
            return
        async with self._turn:
            reply: SecureMessage | StatisticsReport
            try:
                reply = await self._worker.do(self._exchanged, message)
            except UpdateRefused as refusal:
                self._say(f"takes no part in a masked sum of statistics: {refusal}")
                reply = SecureMessage(message.order_id, message.attempt, message.exchange, refused=str(refusal))
            self._link.answer(reply)

    # --- answers, each of which can refuse by UpdateRefused

    def _clear_sums(self, question: StatisticsRequest, plan: Plan | None) -> bytes:
        centres = _read(question.centres_json, dict[str, Centre]) if question.centres_json else {}
        if len(centres) > MOST_COLUMNS or len(question.columns) > MOST_COLUMNS:
            raise UpdateRefused(f"the question is for more than {MOST_COLUMNS} columns")
        whole = self._shard.load()
        answer = site_sketches(whole, centres) if question.centres_json else site_sums(whole, question.columns)
        if (count := len(answer.columns)) > MOST_COLUMNS:
            raise UpdateRefused(f"its data have {count} columns: ask for at most {MOST_COLUMNS} of them (--columns)")
        text = msgspec.json.encode(answer)
        if len(text) > MOST_BYTES:
            raise UpdateRefused(f"its answer has {len(text):,} bytes: ask for fewer columns (--columns)")
        return text

    def _noisy_sums(self, question: StatisticsRequest, plan: Plan | None) -> bytes:
        """Return sums with noise, which are charged. This imports torch."""
        from attune.fedclient.work.private.ledger import BudgetSpent
        from attune.fedclient.work.private.private_learning import noisy_statistics

        if self._shard.load_in is not None:
            why = "it proposes a schema, which tells of its rows: give it the schema of the operator (--schema FILE)"
            raise UpdateRefused(why)
        layout = _read(question.noisy_json, NoisyLayout)
        try:
            sums = noisy_statistics(self._shard.load(), layout, self._options, plan, self._shard.digest)
        except (SettingError, BudgetSpent) as error:
            raise UpdateRefused(str(error)) from None
        except HomeMismatch as error:
            self._say(f"gives no statistics: {error}")
            raise UpdateRefused("its privacy ledger cannot be used; its own log says why") from None
        return msgspec.json.encode(sums)

    def _masked_number(self, question: StatisticsRequest, plan: Plan | None) -> bytes:
        """Make the number of a masked sum, and return nothing: it leaves the device only behind masks."""
        order_id = f"{STATISTICS_ORDER}{question.id}"
        layout = _read(question.layout_json, MaskedLayout)
        layout.check()
        state = self._state()
        if state.answered and state.order_id != order_id:
            raise UpdateRefused("its statistics are summed already, and it hands in to no other sum of them")
        run = f"statistics {question.id} {layout.digest}"
        if self._ready is not None and self._ready.order.vector.startswith(run):
            return b""
        number = packed(layout, slots_of(self._shard.load(), layout))
        signer = signer_of(self._options, self._link.identity)
        minimum = max(FEWEST_DEVICES, self._options.privacy.devices)
        member = Participant(signer.name, signer.credential, signer.ca_pem, layout.federation, run, minimum)
        vector = f"{run} {hashlib.sha256(number).hexdigest()}"
        self._ready = MaskableStatistics(MaskableOrder(order_id, ONE_SUM, vector), member, number)
        return b""

    def _state(self) -> MemberState:
        text = self._store.kept("statistics")
        try:
            return from_json(text, MemberState) if text else MemberState()
        except msgspec.DecodeError:
            raise UpdateRefused("what it kept of masked statistics is damaged (statistics.json of its home)") from None

    def _exchanged(self, message: SecureMessage) -> SecureMessage | StatisticsReport:
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


def _read(text: bytes, form: type[T]) -> T:
    """Return what a question asks for.

    Raises:
        UpdateRefused: It cannot be read.
    """
    try:
        return from_json(text, form)
    except msgspec.DecodeError as error:
        raise UpdateRefused(f"the question cannot be read ({error}): update one of the two") from None


def _moments(shard: LazyShard, plan: Plan) -> tuple[float, ...]:
    """Return the description of the training inputs (common.models.feature_mean); empty if the model has none."""
    import torch

    from attune.common.models.feature_mean import description_size, moments
    from attune.common.models.registry import build
    from attune.fedclient.data.prepare import prepare
    from attune.fedclient.work.objectives.base import Network

    network = Network(build(plan.model, plan.seed))
    if not description_size(network.model):
        return ()
    network.model.eval()
    batches = torch.split(prepare(shard.load_for(plan), plan).train_x, DESCRIBED_AT_ONCE)
    try:
        return tuple(moments(batches, lambda x: network.with_features({}, x)[1]))
    except SettingError:  # a model that computes its logits without calling its head
        return ()
