"""Arrival and departure of devices: their streams, their rows in the ledger, and events for the round."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from attune.common.errors import AttuneError, OrderClosed, Replaced, SettingError, UpdateRefused
from attune.common.exchange.messages import Description, Hello, Notice, SecureMessage, read_profile
from attune.common.plan import LIGHT, MAIN, check_tag, check_variant
from attune.common.protocol import (
    DESCRIPTION,
    EMBEDDING,
    EXACT_SUMS,
    GIVEN_MODEL,
    LOCAL_SCALE,
    MATRIX,
    NOISE,
    SAME_COHORT,
    SCORES,
    SHARED_CHANGE,
    SHARES,
    SPENT,
    SUMS,
)
from attune.common.schema import UNIT_VERDICTS
from attune.common.text import listed
from attune.fedserver.core import data_form, tags
from attune.fedserver.core import messages as events
from attune.fedserver.core import scale as scales
from attune.fedserver.core.adaptation import describes_devices, embeds_on_devices
from attune.fedserver.core.records import KEPT_LABELS, DeviceRecord
from attune.fedserver.core.secure_policy import check_profile, knows_more
from attune.fedserver.federation.federation_state import FederationState, Handle
from attune.fedserver.federation.opening import OrderSender
from attune.fedserver.federation.planner import Planner
from attune.fedserver.federation.refusals import ReportBudget
from attune.fedserver.federation.secure_rounds import SecureRounds
from attune.fedserver.federation.streams import WORK, DeviceStage, Stream
from attune.fedserver.federation.survey import Survey

LOG = logging.getLogger("fedserver")
NOTHING_PERSONAL = "method {} keeps nothing of a device's own: newcomers get the common model as it is"
OTHER_VARIANT = (
    "{0} has the variant {1!r} of the model in this run, not {2!r}: start it with --variant {1}, or enrol it anew, with a new "
    "--home and --name"
)
MAX_NOTE = 500
TWO_PROCESSES = "two processes use the identity of {}"
SECOND_STREAM = "connected while its older stream was open: it came back after a break, or two processes use its identity"


def quarter_of(done: float) -> float | None:
    """Return how much of an order is done, in quarters; None for NaN."""
    return None if math.isnan(done) else int(min(max(done, 0.0), 1.0) * 4) / 4


class Members:
    """Handlers of what devices say on their streams, and of the end of a stream."""

    def __init__(
        self,
        state: FederationState,
        handle: Handle,
        planner: Planner,
        orders: OrderSender,
        secure: SecureRounds,
        survey: Survey,
    ) -> None:
        """Take over the parts of a federation. `handle` tells the round what has happened."""
        self._state, self._handle, self._planner, self._orders = state, handle, planner, orders
        self._secure, self.survey = secure, survey
        self._settings, self._streams, self._turns = state.settings, state.streams, state.turns
        self._budget = ReportBudget()
        self._arrived: list[tuple[Stream, str]] = []  # not yet welcomed, each with a note for the operator
        self._early: list[Stream] = []  # of devices that came before there was a plan
        self._describes = describes_devices(state.settings.configured)
        self._tags: dict[str, str] = {}  # as the ledger has them
        self._described: dict[str, bool] = {}  # devices that have told of their data, or not to: whether the lab knows it
        self._silent: dict[str, Stream] = {}  # newcomers that know the plan and are still to tell of their data

    def rival(self, name: str, process: str) -> Stream | None:
        """Return the open stream of another process with this identity, or None."""
        stream = self._streams.get(name)
        return stream if stream is not None and process and stream.process not in ("", process) else None

    def turned_away(self, name: str, address: str) -> Replaced:
        """Show the operator that two processes use one identity, and return the error for the later one."""
        self._state.troubles.set(
            TWO_PROCESSES.format(name),
            f"a later one, at {address}, was turned away. Stop the one that is not meant to run; if its home was copied by a "
            f"stranger, revoke {name}",
            tries=False,
        )
        return Replaced(f"another process with the identity of {name} is connected, and this one came later")

    def connect(self, name: str, hello: Hello, process: str = "") -> Stream:
        """Open a device's new stream, which owns the device's orders from now on.

        Raises:
            SettingError, ShapeMismatch, UndeclaredLabels: The profile cannot be, or does not fit.
        """
        profile = read_profile(hello.profile_json, name)
        self._settings.encodings.check_device(name, hello.encodings)
        needed = EXACT_SUMS if self._settings.privacy.secure_aggregation else SUMS
        if self._settings.configured.objective.adds_up and needed not in hello.encodings:
            raise SettingError(
                f"{name} hands in no sums over its samples, which method {self._settings.method.name} needs: "
                + ("update fedclient" if needed == EXACT_SUMS else "its owner allows that by fedclient --disclose sums")
            )
        rounds, privacy, of_this = self._settings.round, self._settings.privacy, "of this federation"
        buffered = rounds.mode == "buffered" and "shared" in self._settings.configured.aggregators
        asked = {
            NOISE: (privacy.on_devices, f"cannot train with noise (privacy.unit {of_this})"),
            EMBEDDING: (
                embeds_on_devices(self._settings.configured),
                f"cannot keep its embedding (method.embedding {of_this})",
            ),
            SAME_COHORT: (knows_more(privacy), f"knows no privacy.same_cohort or secure_spare {of_this}"),
            SHARED_CHANGE: (buffered, f"cannot take part in buffered rounds (round.mode {of_this})"),
            SCORES: (self._settings.train.scored_rounds, f"cannot score what it would keep (--method auto {of_this})"),
            GIVEN_MODEL: (rounds.given is not None, "cannot evaluate a given model (fedserver evaluate)"),
            MATRIX: (rounds.matrix, "cannot evaluate networks of other devices (fedserver evaluate --matrix)"),
        }
        if lacks := [why for ability, (is_asked, why) in asked.items() if is_asked and ability not in hello.encodings]:
            raise SettingError(f"{name} {lacks[0]}: update fedclient")
        self._state.revoked.check(name)
        data_form.check_possible(profile, name)
        check_tag(profile.tag or "")
        check_profile(self._settings.privacy, profile, name)
        check_variant(profile.variant or "", self._settings.variants)
        if self._state.plan is not None:
            plan = self._state.plan
            data_form.check_fits(profile, plan, name)
            scales.check_ability(profile, name, LOCAL_SCALE in hello.encodings, scales.Scales(plan.scale, plan.targets))
        else:
            data_form.check_declared(profile, self._settings.data, name)
        stream = Stream(name, profile, hello.software, hello.inline_bytes, hello.encodings, process)
        before = self._streams.get(name)
        broke = before is not None and before.process == process != ""
        note = SECOND_STREAM if self._streams.enter(stream) and not broke else ""
        self._arrived.append((stream, note))
        if len(self._arrived) == 1:
            self._turns.start(self._turns.step(self._welcome))
        return stream

    async def _welcome(self) -> None:
        """Receive all devices that arrived since the last such turn.

        After a break a whole fleet returns at once; its orders are one step.
        """
        arrived, self._arrived = self._arrived, []
        streams = [stream for stream, note in arrived if await self._is_in(stream, note)]
        await self._note_tags(streams)
        if self._state.plan is not None:
            await self._enter(streams)
        else:
            self._early += streams
            if self._early and await self._planner.planned(self._known, self._refuse, self._welcome):
                early, self._early = self._early, []
                await self._enter(early)
        for stream in streams:
            self._tell_who_waits(stream)

    async def _is_in(self, stream: Stream, note: str) -> bool:
        """Mark the device connected if this is its current stream, and return whether it is."""
        name, profile = stream.name, stream.profile
        if not self._streams.is_current(stream):
            return False
        if self._state.plan is not None:
            group = self._state.plan.group_of(profile.variant)
            row = await self._state.storage.ledger.device(name) if group == LIGHT else None
            served = row is not None and (row.fetched >= 0 or name in self._state.round.record.devices)
            if not served:  # else it is light already, or has a network in this run
                await self._planner.vary(self._state.plan, {name: profile})
            if (before := self._planner.variants.get(name, "")) != group:
                await self._refuse(name, SettingError(OTHER_VARIANT.format(name, before or MAIN, group or MAIN)))
                return False
        labels = ", ".join(map(str, profile.labels))[:KEPT_LABELS]
        await self._update(
            name, connected=True, since=self._state.clock.unix(), samples=profile.samples, note=note, labels=labels
        )
        if self._is_written(name, f"{note}{stream.software}"):
            if note:
                LOG.warning("%s: %s", name, note, extra={"device": name})
            LOG.info("%s connected (%d samples, %s)", name, profile.samples, stream.software, extra={"device": name})
        self._state.activity.enter(name, DeviceStage.WAITING)
        if self._state.plan is not None:
            self._streams.send(name, self._planner.welcome(self._state.plan))
        self.survey.connected(name)
        return True

    async def _note_tags(self, streams: Sequence[Stream]) -> None:
        ledger, profiles = self._state.storage.ledger, {stream.name: stream.profile for stream in streams}
        self._tags = await ledger.tags()
        if new := tags.tags_told(profiles, self._tags):
            await ledger.note_tags(new)
            self._tags |= new

    async def _enter(self, streams: Sequence[Stream]) -> None:
        """Tell the round about devices that know the plan. A newcomer waits until it has told of its data, if it will."""
        present = {stream.name: stream.empty for stream in streams if self._streams.is_current(stream)}
        known = await self._known(present)
        contributed = {device.name for device in known if device.contributed}
        asked = self._settings.round.devices
        outside = {device.name for device in known if tags.is_outside(asked, tags.tag_of(device, self._tags))}
        if self._settings.round.matrix:
            outside |= {stream.name for stream in streams if SHARES not in stream.known}
        if self._describes and self._state.round.record.round:
            unheard = {name for name in present.keys() - contributed if not self._described.get(name)}
            silent = {one.name: one for one in streams if one.name in unheard and DESCRIPTION in one.known}
            self._silent |= silent
            present = {name: empty for name, empty in present.items() if name not in silent}
        now = self._state.clock.monotonic()
        await self._handle(
            *(events.Connected(name, now, name not in contributed, no, name in outside) for name, no in present.items())
        )
        for name in present:
            self._secure.connected(name)

    def described(self, name: str, said: Description) -> None:
        """Take in what a device says of its data, if embeddings start from it. The first word stands."""
        if self._describes and self._state.plan is not None and name not in self._described:
            self._described[name] = False
            self._turns.start(self._turns.step(self._take_description, name, said.moments))

    async def _take_description(self, name: str, moments: Sequence[float]) -> None:
        if not await self._state.lab.describe(name, moments):
            LOG.info("%s says nothing of its data that embeddings could start from", name, extra={"device": name})
        self._described[name] = True
        if (stream := self._silent.pop(name, None)) is not None:
            await self._enter([stream])

    async def _refuse(self, name: str, error: AttuneError) -> None:
        if self._is_written(name, str(error)):
            LOG.warning("%s: %s", name, error, extra={"device": name})
        stream = self._streams.get(name)
        if stream is not None:
            stream.close(error)
            self.disconnect(stream)
        self._state.activity.enter(name, DeviceStage.ABSENT, f"refused: {error}")
        await self._update(name, note=str(error)[:MAX_NOTE])

    def _tell_who_waits(self, stream: Stream) -> None:
        record = self._state.round.record
        missing = self._settings.round.min_clients - len(self._streams)
        if record.phase is events.Phase.WAITING and missing > 0:
            stream.send(Notice(f"waiting for {missing} more device{'s' if missing > 1 else ''}"))
        elif record.phase is events.Phase.DONE and self._settings.round.adapt_rounds and not self._settings.adaptation:
            stream.send(Notice(NOTHING_PERSONAL.format(self._settings.method.name)))
        elif record.phase is events.Phase.TRAINING and stream.name not in record.devices:
            stream.send(Notice(f"round {record.round + 1} is under way; waiting for the next"))

    def is_current(self, stream: Stream) -> bool:
        return self._streams.is_current(stream)

    def disconnect(self, stream: Stream) -> None:
        """Handle the end of a stream. The end of an older stream of a device that has reconnected changes nothing."""
        if self._streams.leave(stream):
            self._state.troubles.clear(TWO_PROCESSES.format(stream.name))
            self._turns.start(self._turns.step(self._left, stream))

    async def _left(self, stream: Stream) -> None:
        if self._streams.get(stream.name) is not None:
            return  # it is back already, and its welcome has had its turn or will have it
        await self._update(stream.name, connected=False, since=self._state.clock.unix())
        if self._is_written(stream.name, ""):
            LOG.info("%s disconnected", stream.name, extra={"device": stream.name})
        if self._state.activity.stage(stream.name) is not DeviceStage.ABSENT:  # else it has a better reason
            self._state.activity.enter(stream.name, DeviceStage.ABSENT, "disconnected")
        await self._handle(events.Disconnected(stream.name, self._state.clock.monotonic()))

    async def excuse(self, name: str, reason: str, *, troubled: bool = False) -> None:
        """Let the round go on without this device, and show the reason to the operator.

        Args:
            name: The device.
            reason: The reason, for people.
            troubled: The device itself says that it cannot carry out its order.
        """
        written = self._is_written(name, reason)
        if written:
            LOG.warning("%s: %s", name, reason, extra={"device": name})
        await self._turns.step(self._excused, name, reason, troubled, written)

    async def _excused(self, name: str, reason: str, troubled: bool, written: bool) -> None:
        if written:
            await self._update(name, note=reason[:MAX_NOTE])
        if self._streams.get(name) is not None:
            self._state.activity.enter(name, DeviceStage.WAITING, reason)
        await self._handle(events.Excused(name, self._state.clock.monotonic(), troubled))

    async def progress(self, name: str, order_id: str, done: float) -> None:
        """Note how much of an order a device has done. Each new quarter is written to the ledger; NaN is ignored."""
        quarter = quarter_of(done)
        if quarter is None:
            return
        with contextlib.suppress(OrderClosed, UpdateRefused):
            order = self._state.book.order(name, order_id)
            self._state.activity.enter(name, WORK[order.work])
            stream = self._streams.get(name)
            if stream is not None and stream.moves_to(order_id, quarter):
                await self._update(name, progress=quarter)
            await self._turns.step(self._handle, events.DeviceProgressed(name, self._state.clock.monotonic()))

    async def trouble(self, name: str, order_id: str, reason: str) -> None:
        """Handle a device's report that it cannot carry out an order; without an order, that it takes no part at all."""
        if not order_id:
            if self._is_written(name, reason):
                LOG.warning("%s takes no part: %s", name, reason, extra={"device": name})
                await self._turns.step(self._declined, name, reason)
            return
        with contextlib.suppress(OrderClosed, UpdateRefused):
            self._state.book.order(name, order_id)
            await self.excuse(name, reason, troubled=reason != SPENT)

    def secure(self, name: str, message: SecureMessage) -> None:
        """Take in a device's answer in secure aggregation. Without it, the answer is ignored."""
        try:
            (self.survey if message.of_statistics else self._secure).answered(name, message)
        except UpdateRefused as refusal:
            if self._is_written(name, str(refusal)):
                LOG.warning("%s takes no part in secure aggregation: %s", name, refusal, extra={"device": name})

    async def units(self, name: str, verdicts: Mapping[str, str]) -> None:
        """Show the operator which columns of a device do not fit the ranges of the schema. Unknown words are ignored."""
        plan = self._state.plan
        columns = {} if plan is None or plan.schema is None else plan.schema.columns
        ranged = {column for column in columns if columns[column].range is not None}
        odd = {column: verdict for column, verdict in verdicts.items() if column in ranged and verdict in UNIT_VERDICTS[1:]}
        if odd:
            named = listed([f"{column} ({verdict})" for column, verdict in sorted(odd.items())])
            text = f"columns do not fit the schema's ranges, maybe by their unit: {named}"
            if self._is_written(name, text):
                LOG.warning("%s: %s", name, text, extra={"device": name})
                await self._turns.step(partial(self._update, note=text[:MAX_NOTE]), name)

    def _is_written(self, name: str, text: str) -> bool:
        return self._budget.allows(name, text, self._state.clock.monotonic())

    async def _declined(self, name: str, reason: str) -> None:
        """Note that a device takes no part. It ends its stream next; if it returns in time, it gets its order again."""
        await self._update(name, note=reason[:MAX_NOTE])
        self._state.activity.enter(name, DeviceStage.ABSENT, reason)

    def readmit(self, name: str) -> None:
        """Let a device in under the name of a revoked one, as the operator has decided."""
        self._state.revoked.readmit(name)
        self._planner.variants.pop(name, None)

    async def shut_out(self, error_for: dict[str, AttuneError]) -> int:
        """End the streams of these devices, each with its error, and return how many devices stay connected."""
        for name, error in error_for.items():
            if not self._state.revoked.add(name, error):
                continue
            LOG.warning("%s: %s", name, error, extra={"device": name})
            stream = self._streams.get(name)
            if stream is not None:
                stream.close(error)
                self.disconnect(stream)
            await self._turns.step(self._expel, name, str(error))
        return len(self._streams)

    async def _expel(self, name: str, reason: str) -> None:
        await self._update(name, note=reason[:MAX_NOTE])
        self._state.activity.enter(name, DeviceStage.ABSENT, reason)
        await self.expel(name)
        self._secure.drop(name, reason)
        self.survey.drop(name, reason)

    async def expel(self, name: str) -> None:
        """Continue the round without a revoked device, and remove its update from the inbox. The caller must have the turn."""
        state, before = self._state, self._state.round.record
        self._orders.count_votes_anew()
        await self._handle(events.Expelled(name, state.clock.monotonic()))
        # An aggregation under way is not started again, and it still reads this update.
        if before.phase is not events.Phase.AGGREGATING or name not in before.cohort:
            discard = partial(state.executors.disk, state.inbox.discard, before.order_of(name))
            await state.troubles.overcome("expelling a device", discard)

    async def _known(self, names: Collection[str]) -> list[DeviceRecord]:
        read = partial(self._state.storage.ledger.devices, names)
        return await self._state.troubles.overcome("reading who is known", read)

    async def _update(self, name: str, **fields: Any) -> None:
        write = partial(self._state.storage.ledger.update_device, name, **fields)
        await self._state.troubles.overcome("writing who is connected", write)
