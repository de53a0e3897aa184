"""Survey of the data of all connected devices: questions for clear, masked or noised statistics.

There is one masked sum in the life of a home, for a second one over other devices would show what differs: it is kept, and
shown again. It is durable as soon as its survivors are fixed. Until then a restart begins anew with other keys; afterwards it
goes on with the same survivors, or there is no sum.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError, UpdateRefused
from attune.common.exchange.messages import FixedSurvivors, SecureMessage, StatisticsReport, StatisticsRequest
from attune.common.plan import FEWEST_DEVICES, Profile
from attune.common.protocol import MASKED, MASKED_SCALE, NOISY_STATISTICS, STATISTICS, STATISTICS_ORDER
from attune.common.secure.masked_sums import ONE_SUM, added, plus_masks
from attune.common.site_statistics import MOST_COLUMNS, NoisySums, SiteSketches, SiteSums
from attune.common.text import clean, from_json, listed
from attune.fedserver.core.scale import Scales
from attune.fedserver.federation.exchanger import Exchanger
from attune.fedserver.federation.federation_state import FederationState, Handle
from attune.fedserver.ports.blobs import MASKED_STATISTICS, Damaged
from attune.fedserver.surveys.answers import (
    KeptSum,
    SumReader,
    centres_of,
    check_sketches,
    check_sums,
    clear_fleet,
    noisy_fleet,
)
from attune.fedserver.surveys.fleet_statistics import FleetStatistics
from attune.fedserver.surveys.layouts import Asks, columns_of, masked_layout, noisy_layout, scaled_of, survival_columns

LOG = logging.getLogger("fedserver")
T = TypeVar("T")
LONGEST_S = 600.0
TOO_OLD = "its fedclient is too old to answer: update it"
TOO_MUCH = "the answers of all devices together are too large: ask for fewer columns (--columns)"
MOST_BYTES = 256 << 20  # of the answers in one pass
SILENT = "it did not answer in time"
NOT_ALLOWED = "it gives no masked statistics (fedclient --disclose masked-statistics), or is too old"
CAME_LATER = "it is not in the one masked sum of this federation"


def without_statistics(privacy: PrivacySettings) -> str:
    """Return why a federation with these settings asks for no statistics; empty if it does."""
    if privacy.statistics_epsilon is not None or not (privacy.on_devices or privacy.on_server):
        return ""
    remedy = "set privacy.statistics_epsilon, and devices add noise to them"
    why = "privacy.clip bounds a device's change, and nothing bounds its statistics" if privacy.on_server else remedy
    return f"statistics have no noise, and this federation promises it (privacy.unit = {privacy.unit!r}): {why}"


class Survey(Exchanger):
    """Survey of the fleet's data. One runs at a time.

    Args:
        state: The federation, among whose blobs the masked sum is kept.
        name: The federation's fingerprint.
        handle: Takes an exchange in that is over.

    Attributes:
        wait_s: Seconds for which an exchange of a masked sum for scales waits.
    """

    def __init__(self, state: FederationState, name: str, handle: Handle) -> None:
        super().__init__(state, handle, "statistics ")
        privacy = self._privacy = state.settings.privacy
        self._asks = Asks(name, privacy, state.settings.data)
        self._streams, self._blobs, self._executors = state.streams, state.storage.blobs, state.executors
        self._masks = privacy.secure_aggregation and not privacy.on_devices and not privacy.on_server
        self._minimum, self.wait_s = max(FEWEST_DEVICES, privacy.secure_devices), privacy.secure_wait_s
        self._turn = asyncio.Lock()
        self._question = StatisticsRequest("")
        self._awaited, self._reports = set[str](), dict[str, StatisticsReport]()
        self._told = set[str]()  # devices that know the question on their present stream
        self._bytes = 0  # of the reports
        self._number = b""  # sum of what the devices of a masked sum have masked

    def __repr__(self) -> str:
        return f"Survey(awaits {len(self._awaited)}, has {len(self._reports)})"

    async def run(self, columns: Sequence[str], patience_s: float) -> FleetStatistics:
        """Ask the connected devices in two passes, for a masked sum or for noisy sums, and return what may be shown.

        Args:
            columns: Names of the columns that are meant; empty: all.
            patience_s: For how long each pass or exchange waits for answers at most.

        Raises:
            SettingError: The settings have privacy, the question cannot be, or there is no masked sum, and why.
        """
        if why := without_statistics(self._privacy):
            raise SettingError(why)
        if len(columns) > MOST_COLUMNS or not 0 < patience_s <= LONGEST_S:
            raise SettingError(f"statistics are of at most {MOST_COLUMNS} columns, and wait from 0 to {LONGEST_S:.0f} s")
        ask = self._masked if self._masks else self._clear if self._privacy.statistics_epsilon is None else self._noisy
        async with self._turn:
            return await ask(columns, patience_s)

    async def _clear(self, columns: Sequence[str], patience_s: float) -> FleetStatistics:
        known = {name for profile in self._streams.profiles().values() for name in columns_of(profile)}
        if lacking := [name for name in columns if name not in known]:
            raise SettingError(f"no connected device has a column {clean(lacking[0])!r}")
        profiles, without = self._able(STATISTICS)
        question = StatisticsRequest("", tuple(columns))
        sites, refused = await self._answers(
            profiles, question, patience_s, SiteSums, lambda name, sums: check_sums(sums, profiles[name])
        )
        survival = survival_columns(profiles[name] for name in sites)
        centres = centres_of(sites, survival=survival)
        question = replace(question, centres_json=msgspec.json.encode(centres))
        sketches, _ = await self._answers(
            sites if centres else (),
            question,
            patience_s,
            SiteSketches,
            lambda name, sketches: check_sketches(sketches, sites[name], centres, survival),
        )
        return await asyncio.to_thread(clear_fleet, sites, sketches, profiles, without | refused)

    async def _noisy(self, columns: Sequence[str], patience_s: float) -> FleetStatistics:
        profiles, without = self._able(NOISY_STATISTICS)
        layout, withheld = noisy_layout(self._asks, profiles, columns)
        samples = {name: profile.samples + profile.test_samples for name, profile in profiles.items()}
        question = StatisticsRequest("", noisy_json=msgspec.json.encode(layout))
        answers, refused = await self._answers(
            profiles, question, patience_s, NoisySums, lambda name, sums: sums.check(layout, samples[name])
        )
        return await asyncio.to_thread(noisy_fleet, layout, answers, without | refused, withheld)

    async def _masked(self, columns: Sequence[str], patience_s: float) -> FleetStatistics:
        """Make the sum, or go on with the one that is kept."""
        try:
            kept, refused = await self._sum(columns, patience_s, self._streams.profiles())
            reader = await self._executors.disk(SumReader, kept)
        except UpdateRefused as refusal:
            raise SettingError(f"there are no masked statistics: {refusal}") from None
        if lacking := [name for name in columns if name not in kept.layout.columns]:
            raise SettingError(f"the one masked sum of this federation has no column {lacking[0]!r}")
        absent = self._streams.profiles().keys() - set(kept.fixed.survivors)
        others = {name: CAME_LATER if self._streams.can(name, MASKED) else NOT_ALLOWED for name in absent}
        return reader.statistics(columns, {name: refused.get(name, why) for name, why in others.items()})

    def wanting(self, profiles: Mapping[str, Profile]) -> bool:
        """Return whether enough of these devices want to be scaled by a masked sum."""
        wish = [name for name in profiles if self._streams.can(name, MASKED) and self._streams.can(name, MASKED_SCALE)]
        return self._masks and len(wish) >= self._minimum

    async def scale(self, profiles: Mapping[str, Profile]) -> Scales:
        """Return the common scales of these devices' data, by the masked sum that is kept or by a new one.

        Raises:
            UpdateRefused: There is no sum.
        """
        async with self._turn:
            kept, _ = await self._sum((), self.wait_s, profiles, for_scales=True)
        scales = (await self._executors.disk(SumReader, kept)).scales
        features, targets = scaled_of(next(iter(profiles.values())))
        return Scales(
            scales.features if kept.layout.features == features else None,
            scales.targets if kept.layout.targets == targets else None,
        )

    # --- a question and its answers

    def _able(self, ability: str) -> tuple[dict[str, Profile], dict[str, str]]:
        """Return what the connected devices with an ability declare, and why the others are not asked."""
        profiles = self._streams.profiles()
        able = {name: profile for name, profile in profiles.items() if self._streams.can(name, ability)}
        return able, dict.fromkeys(profiles.keys() - able.keys(), TOO_OLD)

    async def _asked(self, names: Collection[str], question: StatisticsRequest, least: int, wait_s: float) -> dict[str, str]:
        """Ask these devices, of which so many answers are of use, and return why some of them give none."""
        self._question, self._told = replace(question, id=secrets.token_hex(8)), set()
        self._awaited, self._reports, self._bytes = set(names), {}, 0
        await self.wait(lambda: self._awaited, least, wait_s, self._ask)
        silent, self._awaited = dict.fromkeys(self._awaited, SILENT), set()
        return silent | {name: report.refused for name, report in self._reports.items() if report.refused}

    async def _answers(
        self,
        names: Collection[str],
        question: StatisticsRequest,
        patience_s: float,
        form: type[T],
        check: Callable[[str, T], None],
    ) -> tuple[dict[str, T], dict[str, str]]:
        """Ask these devices, and return the answers that come in time and pass the check, and why others have none."""
        refused = await self._asked(names, question, FEWEST_DEVICES, patience_s)
        reports = {name: report for name, report in sorted(self._reports.items()) if name not in refused}
        answers, wrong = await asyncio.to_thread(_read, reports, form, check)
        return answers, refused | wrong

    # --- the masked sum

    async def _sum(
        self, wanted: Sequence[str], wait_s: float, profiles: Mapping[str, Profile], for_scales: bool = False
    ) -> tuple[KeptSum, Mapping[str, str]]:
        """Return the sum without masks, and why devices take no part in it."""
        from attune.common.secure.statements import Occasion
        from attune.fedserver.core.collector import CohortRule, Collector

        kept, refused = await self._executors.disk(self._read), dict[str, str]()
        if kept is not None and not kept.is_masked:
            return kept, refused
        try:
            if kept is None:
                able = {name: profile for name, profile in profiles.items() if self._streams.can(name, MASKED)}
                layout, refused = masked_layout(self._asks, able, wanted, for_scales)
                question = StatisticsRequest("", layout_json=msgspec.json.encode(layout))
                if len(names := able.keys() - refused.keys()) >= self._minimum:
                    refused |= await self._asked(names, question, self._minimum, wait_s)
                fixed, asked, self._number = None, tuple(sorted(names - refused.keys())), bytes(layout.size)
                if len(asked) < self._minimum:
                    reasons = listed(sorted(f"{name}: {why}" for name, why in refused.items()), 3) or NOT_ALLOWED
                    raise UpdateRefused(f"{len(asked)} devices take part, and {self._minimum} must ({reasons})")
            else:  # an earlier process, or an earlier try, has fixed the survivors
                layout, fixed, asked, self._number = kept.layout, kept.fixed, kept.fixed.survivors, kept.number
                self._question = StatisticsRequest(kept.id, layout_json=msgspec.json.encode(layout))
            about = self._question.id
            occasion = Occasion(self._asks.federation, f"statistics {about} {layout.digest}", ONE_SUM, 1)
            orders = dict.fromkeys(asked, f"{STATISTICS_ORDER}{about}")

            async def keep(fixed: FixedSurvivors, is_masked: bool = True) -> KeptSum:
                kept = KeptSum(about, layout, fixed, self._number, is_masked)
                await self._executors.disk(self._blobs.put, MASKED_STATISTICS, msgspec.json.encode(kept))
                return kept

            collector = Collector(occasion, orders, CohortRule(asked, self._minimum), fixed)
            unmasking = await self.carried_out(collector, wait_s, 0, keep)
            self._number = await self._executors.disk(plus_masks, self._number, unmasking.seeds)
            assert collector.fixed is not None  # noqa: S101 (the exchanges have fixed them)
            LOG.info("the statistics of %d devices are summed", len(collector.fixed.survivors))
            return await keep(collector.fixed, False), refused
        finally:
            self.collector, self._told = None, set()

    def _read(self) -> KeptSum | None:
        try:
            return from_json(self._blobs.get(MASKED_STATISTICS), KeptSum)
        except KeyError:
            return None
        except msgspec.DecodeError as error:
            raise Damaged(f"{MASKED_STATISTICS} is damaged ({error}): restore it from a backup", MASKED_STATISTICS) from None

    # --- what devices say

    def _ask(self, name: str) -> None:
        self._told.add(name)
        self._streams.send(name, self._question)

    def send(self, name: str, message: SecureMessage) -> None:
        """Send a message, and before it the question, if the device does not know it on this stream."""
        if name not in self._told and self._streams.get(name) is not None:
            self._ask(name)
        super().send(name, message)

    def connected(self, name: str) -> None:
        """Ask a device again that has a new stream, such as one that has rested."""
        self._told.discard(name)
        if name in self._awaited:
            self._ask(name)
        super().connected(name)

    def answered(self, name: str, message: SecureMessage) -> None:
        """Take a device's answer in a masked sum in. Errors are those of Exchanger.answered."""
        if message.of_statistics == self._question.id:
            super().answered(name, message)

    def drop(self, name: str, why: str) -> None:
        """Go on without a device."""
        self.reported(name, StatisticsReport(self._question.id, refused=why))

    def reported(self, name: str, report: StatisticsReport) -> None:
        """Take in a device's statistics, or that it can mask them, or what it has masked. What was not asked for is dropped."""
        if report.id != self._question.id:
            return
        if name in self._awaited:
            self._awaited.discard(name)
            self._bytes += len(report.report_json)
            self._reports[name] = report if self._bytes <= MOST_BYTES else StatisticsReport(report.id, refused=TOO_MUCH)
            self.came(name)
        collector = self.collector
        if collector is not None and report.refused:
            super().drop(name, report.refused)
        elif collector is not None and collector.exchange == "masked" and name in collector.pending and report.masked:
            if len(report.masked) != len(self._number):
                super().drop(name, "it has sent a number of another length")
                return
            self._number = added(self._number, report.masked)
            self.masked(name)


def _read(
    reports: Mapping[str, StatisticsReport], form: type[T], check: Callable[[str, T], None]
) -> tuple[dict[str, T], dict[str, str]]:
    """Return the answers that can be read and pass the check, and for each other device the reason."""
    answers, refused = {}, {}
    for name, report in reports.items():
        try:
            answer = from_json(report.report_json, form)
            check(name, answer)
            answers[name] = answer
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            refused[name] = "its answer cannot be read"
        except UpdateRefused as error:
            refused[name] = str(error)
    return answers, refused
