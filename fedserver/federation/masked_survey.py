"""The one masked sum of the devices' statistics: the exchanges of secure aggregation before, or beside, the rounds.

A second sum over other devices would show what differs. So there is one in the life of a home: it is kept, and shown again.
It is durable as soon as its survivors are fixed. Until then a restart begins anew with other keys; afterwards it goes on with
the same survivors, or there is no sum.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError, UpdateRefused
from attune.common.exchange.messages import FixedSurvivors, SecureMessage, StatisticsReport, StatisticsRequest
from attune.common.faults import SERVER, fail_at
from attune.common.plan import FEWEST_DEVICES, Profile
from attune.common.protocol import MASKED, MASKED_SCALE, STATISTICS_ORDER
from attune.common.secure.masked_sums import ONE_SUM, MaskedLayout, added, plus_masks
from attune.common.text import from_json, listed
from attune.fedserver.core.scale import MaskedScales
from attune.fedserver.executors import Executors
from attune.fedserver.federation.exchanger import ExchangeAccount, Exchanger
from attune.fedserver.federation.streams import Streams
from attune.fedserver.ports.blobs import MASKED_STATISTICS, Blobs, Damaged
from attune.fedserver.surveys.fleet_statistics import FleetStatistics
from attune.fedserver.surveys.masked_statistics import KeptSum, SumReader, layout_of, scaled_of

if TYPE_CHECKING:
    from attune.fedserver.core.collector import Collector

LOG = logging.getLogger("fedserver")
NOT_ALLOWED = "it gives no masked statistics (fedclient --disclose masked-statistics), or is too old"
CAME_LATER = "it is not in the one masked sum of this federation"


class MaskedSurvey:
    """Masked sum of a fleet's statistics.

    Args:
        privacy: The section [privacy].
        federation: The federation's fingerprint.
        streams: Streams of the devices.
        blobs: Where the sum is kept.
        executors: The threads.
        account: The fleet's account of waits.
    """

    def __init__(
        self,
        privacy: PrivacySettings,
        federation: str,
        streams: Streams,
        blobs: Blobs,
        executors: Executors,
        account: ExchangeAccount,
    ) -> None:
        self.on = privacy.secure_aggregation and not privacy.on_devices and not privacy.on_server
        self._minimum, self.wait_s = max(FEWEST_DEVICES, privacy.secure_devices), privacy.secure_wait_s
        self.federation = federation
        self._streams, self._blobs, self._executors = streams, blobs, executors
        self._exchanger = Exchanger(self._send, account, "statistics ")
        self._turn = asyncio.Lock()
        self._question = StatisticsRequest("")
        self._told = set[str]()  # devices that know the question on their present stream
        self._awaited, self._refused = set[str](), dict[str, str]()
        self.common = MaskedScales()  # by which the plan scales data
        self._number = b""  # sum of what the devices of this attempt have masked

    async def run(self, wanted: Sequence[str], wait_s: float) -> FleetStatistics:
        """Make the sum, or go on with the one that is kept, and return what may be shown of it.

        Args:
            wanted: Names of the columns that are meant; empty: all.
            wait_s: For how long each exchange waits for answers.

        Raises:
            SettingError: There is no sum, and the message says why.
        """
        try:
            async with self._turn:
                kept, refused = await self._sum(wanted, wait_s, self._streams.profiles())
            reader = await self._executors.disk(SumReader, kept)
        except UpdateRefused as refusal:
            raise SettingError(f"there are no masked statistics: {refusal}") from None
        if lacking := [name for name in wanted if name not in kept.layout.columns]:
            raise SettingError(f"the one masked sum of this federation has no column {lacking[0]!r}")
        absent = self._streams.profiles().keys() - set(kept.fixed.survivors)
        without = {name: refused.get(name, CAME_LATER if self._allows(name) else NOT_ALLOWED) for name in absent}
        return reader.statistics(wanted, without)

    def wanting(self, profiles: Mapping[str, Profile]) -> bool:
        """Return whether enough of these devices want to be scaled by a masked sum."""
        wish = [name for name in profiles if self._allows(name) and self._streams.can(name, MASKED_SCALE)]
        return self.on and len(wish) >= self._minimum

    async def scale(self, profiles: Mapping[str, Profile], wait_s: float) -> None:
        """Set the common scales of these devices' data, by the sum that is kept or by a new one.

        Raises:
            UpdateRefused: There is no sum.
        """
        async with self._turn:
            kept, _ = await self._sum((), wait_s, profiles, for_scales=True)
        scales = (await self._executors.disk(SumReader, kept)).scales
        features, targets = scaled_of(next(iter(profiles.values())))
        self.common = MaskedScales(
            scales.features if kept.layout.features == features else None,
            scales.targets if kept.layout.targets == targets else None,
        )

    # --- the sum

    async def _sum(
        self, wanted: Sequence[str], wait_s: float, profiles: Mapping[str, Profile], for_scales: bool = False
    ) -> tuple[KeptSum, Mapping[str, str]]:
        kept, refused = await self._executors.disk(self._read), dict[str, str]()
        try:
            if kept is None:
                able = {name: profile for name, profile in profiles.items() if self._allows(name)}
                layout, refused = layout_of(self.federation, able, wanted, for_scales)
                kept = await self._collected(layout, able.keys() - refused.keys(), refused, wait_s)
            if kept.is_masked:
                kept = await self._unmasked(kept, wait_s)
        finally:
            self._exchanger.collector, self._told = None, set()
        return kept, refused

    async def _collected(self, layout: MaskedLayout, names: set[str], refused: dict[str, str], wait_s: float) -> KeptSum:
        """Carry out the exchanges until the survivors are fixed, and keep the sum of what they have masked.

        Devices that take no part are added to `refused`.
        """
        if len(names) >= self._minimum:
            refused |= await self._asked(layout, names, wait_s)
        asked = tuple(sorted(names - refused.keys()))
        if len(asked) < self._minimum:
            reasons = listed(sorted(f"{name}: {why}" for name, why in refused.items()), 3) or NOT_ALLOWED
            raise UpdateRefused(f"{len(asked)} devices take part, and {self._minimum} must ({reasons})")
        collector = self._begin(layout, asked, None)
        self._number = bytes(layout.size)
        while (fixed := collector.fixed) is None:
            await self._exchange(collector, wait_s)
        kept = KeptSum(self._question.id, layout, fixed, self._number)
        await self._executors.disk(self._write, kept)
        fail_at(SERVER, 0, "secure-masked")
        return kept

    async def _unmasked(self, kept: KeptSum, wait_s: float) -> KeptSum:
        """Let the survivors take the masks off the sum, and keep it without them."""
        collector = self._exchanger.collector
        if collector is None:  # an earlier process, or an earlier try, has fixed them
            self._question = StatisticsRequest(kept.id, layout_json=msgspec.json.encode(kept.layout))
            collector = self._begin(kept.layout, kept.fixed.survivors, kept.fixed)
        while collector.exchange != "unmasking":
            await self._exchange(collector, wait_s)
        await self._exchanger.answers(wait_s)
        unmasking = collector.unmasking()
        fail_at(SERVER, 0, "secure-unmasking")
        number = await self._executors.disk(plus_masks, kept.number, unmasking.seeds)
        plain = msgspec.structs.replace(kept, number=number, is_masked=False)
        await self._executors.disk(self._write, plain)
        LOG.info("the statistics of %d devices are summed", len(kept.fixed.survivors))
        return plain

    def _begin(self, layout: MaskedLayout, names: tuple[str, ...], fixed: FixedSurvivors | None) -> Collector:
        from attune.common.secure.statements import Occasion
        from attune.fedserver.core.collector import CohortRule, Collector

        occasion = Occasion(self.federation, f"statistics {self._question.id} {layout.digest}", ONE_SUM, 1)
        orders = dict.fromkeys(names, f"{STATISTICS_ORDER}{self._question.id}")
        collector = self._exchanger.collector = Collector(occasion, orders, CohortRule(names, self._minimum), fixed)
        return collector

    async def _exchange(self, collector: Collector, wait_s: float) -> None:
        exchange = collector.exchange
        await self._exchanger.answers(wait_s)
        collector.advance()
        if exchange != "masked":
            fail_at(SERVER, 0, f"secure-{exchange}")

    async def _asked(self, layout: MaskedLayout, names: set[str], wait_s: float) -> dict[str, str]:
        """Tell devices what is to be summed, and return why some of them take no part."""
        self._question = StatisticsRequest(secrets.token_hex(8), layout_json=msgspec.json.encode(layout))
        self._awaited, self._refused = set(names), {}
        await self._exchanger.wait(lambda: self._awaited, self._minimum, wait_s, self._ask)
        silent = dict.fromkeys(self._awaited, "it did not answer in time")
        self._awaited = set()
        return self._refused | silent

    # --- what is kept

    def _read(self) -> KeptSum | None:
        try:
            return from_json(self._blobs.get(MASKED_STATISTICS), KeptSum)
        except KeyError:
            return None
        except msgspec.DecodeError as error:
            raise Damaged(f"{MASKED_STATISTICS} is damaged ({error}): restore it from a backup", MASKED_STATISTICS) from None

    def _write(self, kept: KeptSum) -> None:
        self._blobs.put(MASKED_STATISTICS, msgspec.json.encode(kept))

    # --- what devices say

    def _allows(self, name: str) -> bool:
        return self._streams.can(name, MASKED)

    def _ask(self, name: str) -> None:
        self._told.add(name)
        self._streams.send(name, self._question)

    def _send(self, name: str, message: SecureMessage) -> None:
        """Send a message, and before it the question, if the device does not know it on this stream."""
        if name not in self._told and self._streams.get(name) is not None:
            self._ask(name)
        self._streams.send(name, message)

    def connected(self, name: str) -> None:
        """Ask a device again that has a new stream."""
        self._told.discard(name)
        if name in self._awaited:
            self._ask(name)
        self._exchanger.ask_again(name)

    def answered(self, name: str, message: SecureMessage) -> None:
        """Take a device's answer in. Errors are those of Exchanger.answered."""
        if message.of_statistics == self._question.id:
            self._exchanger.answered(name, message)

    def drop(self, name: str, why: str) -> None:
        """Go on without a device."""
        self._exchanger.drop(name, why)
        self._reported(name, why)

    def reported(self, name: str, report: StatisticsReport) -> None:
        """Take in that a device can mask its statistics, that it does not, or what it has masked."""
        if report.id != self._question.id:
            return
        collector = self._exchanger.collector
        self._reported(name, report.refused)
        if collector is not None and report.refused:
            self._exchanger.drop(name, report.refused)
        elif collector is not None and collector.exchange == "masked" and name in collector.pending and report.masked:
            if len(report.masked) != len(self._number):
                self._exchanger.drop(name, "it has sent a number of another length")
                return
            self._number = added(self._number, report.masked)
            self._exchanger.masked(name)

    def _reported(self, name: str, refused: str) -> None:
        if name in self._awaited:
            self._awaited.discard(name)
            self._refused |= {name: refused} if refused else {}
            self._exchanger.came(name)
