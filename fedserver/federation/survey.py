"""Questions of the operator to all connected devices for statistics of their data, and the devices' answers."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from attune.common.config import PrivacySettings
from attune.common.errors import SettingError, UpdateRefused
from attune.common.exchange.messages import StatisticsReport, StatisticsRequest
from attune.common.plan import FEWEST_DEVICES, Profile
from attune.common.privacy.noisy_statistics import NoisySums
from attune.common.protocol import NOISY_STATISTICS, STATISTICS
from attune.common.site_statistics import MOST_COLUMNS, SiteSketches, SiteSums
from attune.common.text import clean, from_json
from attune.fedserver.federation.exchanger import ExchangeAccount, Waits
from attune.fedserver.federation.masked_survey import MaskedSurvey
from attune.fedserver.federation.streams import Streams
from attune.fedserver.surveys.fleet_statistics import (
    FleetStatistics,
    centres_of,
    check_sketches,
    check_sums,
    columns_of,
    fleet_statistics,
    survival_columns,
)
from attune.fedserver.surveys.noisy_fleet import NoisyQuestions, noisy_fleet

T = TypeVar("T")
LONGEST_S = 600.0
TOO_OLD = "its fedclient is too old to answer: update it"
TOO_MUCH = "the answers of all devices together are too large: ask for fewer columns (--columns)"
MOST_BYTES = 256 << 20  # of the answers in one pass
SILENT = "it did not answer in time"


def without_statistics(privacy: PrivacySettings) -> str:
    """Return why a federation with these settings asks for no statistics without noise; empty if it does."""
    if not privacy.on_devices and not privacy.on_server:
        return ""
    remedy = "set privacy.statistics_epsilon, and devices add noise to them"
    why = "privacy.clip bounds a device's change, and nothing bounds its statistics" if privacy.on_server else remedy
    return f"statistics have no noise, and this federation promises it (privacy.unit = {privacy.unit!r}): {why}"


class Survey:
    """Survey of the fleet's data. One runs at a time.

    Args:
        streams: Streams of the connected devices.
        private: Why statistics are not asked for; empty: they are.
        account: The fleet's account of waits.
        masked: The masked sum, which takes the place of all of this under secure aggregation.
        noisy: What is asked for with noise, in the place of all of this if privacy.statistics_epsilon is set.
    """

    def __init__(
        self,
        streams: Streams,
        private: str,
        account: ExchangeAccount,
        masked: MaskedSurvey | None = None,
        noisy: NoisyQuestions | None = None,
    ) -> None:
        self._streams, self._private, self._waits = streams, private, Waits(account)
        self._noisy = noisy if noisy is not None and noisy.privacy.statistics_epsilon is not None else None
        self._masked = masked if masked is not None and masked.on else None
        self._turn = asyncio.Lock()
        self._id, self._awaited, self._question = "", set[str](), StatisticsRequest("")
        self._reports: dict[str, StatisticsReport] = {}
        self._bytes = 0

    def __repr__(self) -> str:
        return f"Survey(awaits {len(self._awaited)}, has {len(self._reports)})"

    async def run(self, columns: Sequence[str], patience_s: float) -> FleetStatistics:
        """Ask the connected devices in two passes, for a masked sum or for noisy sums, and return what may be shown.

        Args:
            columns: Names of the columns that are meant; empty: all.
            patience_s: For how long each pass waits for answers at most.

        Raises:
            SettingError: The settings have privacy, or the question cannot be.
        """
        if self._private and self._noisy is None:
            raise SettingError(self._private)
        if len(columns) > MOST_COLUMNS or not 0 < patience_s <= LONGEST_S:
            raise SettingError(f"statistics are of at most {MOST_COLUMNS} columns, and wait from 0 to {LONGEST_S:.0f} s")
        if self._masked is not None:
            return await self._masked.run(columns, patience_s)
        if self._noisy is not None:
            return await self._noisy_run(self._noisy, columns, patience_s)
        async with self._turn:
            known = {name for profile in self._streams.profiles().values() for name in columns_of(profile)}
            if lacking := [name for name in columns if name not in known]:
                raise SettingError(f"no connected device has a column {clean(lacking[0])!r}")
            profiles, without = self._able(STATISTICS)
            question = StatisticsRequest("", tuple(columns))
            sites, refused = await self._pass(
                profiles, question, patience_s, SiteSums, lambda name, sums: check_sums(sums, profiles[name])
            )
            survival = survival_columns(profiles[name] for name in sites)
            centres = centres_of(sites, survival=survival)
            question = replace(question, centres_json=msgspec.json.encode(centres))
            sketches, _ = await self._pass(
                sites if centres else (),
                question,
                patience_s,
                SiteSketches,
                lambda name, sketches: check_sketches(sketches, sites[name], centres, survival),
            )
            return await asyncio.to_thread(fleet_statistics, sites, sketches, profiles, without | refused)

    def connected(self, name: str) -> None:
        """Ask a device again that has a new stream, such as one that has rested."""
        if name in self._awaited:
            self._ask(name)

    def _ask(self, name: str) -> None:
        self._streams.send(name, self._question)

    def answered(self, name: str, report: StatisticsReport) -> None:
        """Take in the answer of a device. An answer that was not asked for is dropped."""
        if self._masked is not None:
            self._masked.reported(name, report)
        if name not in self._awaited or report.id != self._id:
            return
        self._awaited.discard(name)
        self._bytes += len(report.report_json)
        self._reports[name] = report if self._bytes <= MOST_BYTES else StatisticsReport(report.id, refused=TOO_MUCH)
        self._waits.came(name)

    async def _noisy_run(self, noisy: NoisyQuestions, columns: Sequence[str], patience_s: float) -> FleetStatistics:
        """Ask the connected devices for sums with noise, in one pass."""
        async with self._turn:
            profiles, without = self._able(NOISY_STATISTICS)
            layout, withheld = noisy.layout(profiles, columns)
            samples = {name: profile.samples + profile.test_samples for name, profile in profiles.items()}
            question = StatisticsRequest("", noisy_json=msgspec.json.encode(layout))
            answers, refused = await self._pass(
                profiles, question, patience_s, NoisySums, lambda name, sums: sums.check(layout, samples[name])
            )
            return await asyncio.to_thread(noisy_fleet, layout, answers, without | refused, withheld)

    def _able(self, ability: str) -> tuple[dict[str, Profile], dict[str, str]]:
        """Return what the connected devices with an ability declare, and why the others are not asked."""
        profiles = self._streams.profiles()
        able = {name: profile for name, profile in profiles.items() if self._streams.can(name, ability)}
        return able, dict.fromkeys(profiles.keys() - able.keys(), TOO_OLD)

    async def _pass(
        self,
        names: Collection[str],
        question: StatisticsRequest,
        patience_s: float,
        form: type[T],
        check: Callable[[str, T], None],
    ) -> tuple[dict[str, T], dict[str, str]]:
        """Ask these devices, and return the answers that come in time and pass the check, and why others have none."""
        self._id, self._awaited, self._reports, self._bytes = secrets.token_hex(8), set(names), {}, 0
        self._question = replace(question, id=self._id)
        await self._waits.wait(lambda: self._awaited, FEWEST_DEVICES, patience_s, self._ask)
        silent, self._awaited = dict.fromkeys(self._awaited, SILENT), set()
        answers, refused = await asyncio.to_thread(_read, self._reports, form, check)
        return answers, refused | silent


def _read(
    reports: Mapping[str, StatisticsReport], form: type[T], check: Callable[[str, T], None]
) -> tuple[dict[str, T], dict[str, str]]:
    """Return the answers that can be read and pass the check, and for each other device the reason."""
    answers, refused = {}, {}
    for name, report in sorted(reports.items()):
        if report.refused:
            refused[name] = report.refused
            continue
        try:
            answer = from_json(report.report_json, form)
            check(name, answer)
            answers[name] = answer
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            refused[name] = "its answer cannot be read"
        except UpdateRefused as error:
            refused[name] = str(error)
    return answers, refused
