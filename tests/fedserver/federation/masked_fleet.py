"""A fleet in memory that gives masked statistics to a server: its own code on both sides, without a network."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from attune.common.config import PrivacySettings, RoundSettings
from attune.common.errors import UpdateRefused
from attune.common.exchange.messages import SecureMessage, StatisticsReport, StatisticsRequest
from attune.common.plan import DataSettings
from attune.common.protocol import MASKED, MASKED_SCALE
from attune.fedclient.address import ServerAddress
from attune.fedclient.data.lazy_shard import LazyShard, shard_of
from attune.fedclient.disclosing import Discloser
from attune.fedclient.gate import Gate
from attune.fedclient.home import Identity
from attune.fedclient.options import DeviceOptions
from attune.fedclient.store import MemoryStore
from attune.fedserver.core.messages import Attempted, Exchanged
from attune.fedserver.core.phases import Rules
from attune.fedserver.core.policy import Synchronous
from attune.fedserver.core.round import step
from attune.fedserver.core.state import Round
from attune.fedserver.executors import InlineExecutors
from attune.fedserver.federation.steps import Clock, Turns
from attune.fedserver.federation.streams import Stream, Streams
from attune.fedserver.federation.survey import Survey
from attune.fedserver.surveys.fleet_statistics import FleetStatistics
from attune.simulation.in_process import InlineWorker
from attune.simulation.memory import MemoryBlobs
from tests.common.secure.cohort import credential_of, the_authority

NAMES = tuple(f"site{number}" for number in range(6))
PRIVACY = PrivacySettings(secure_aggregation=True)
Answer = SecureMessage | StatisticsReport
Change = Callable[[str, Any], Any]  # takes a device and a message to it, and returns another message, or None


def tables(names: Sequence[str] = NAMES) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return two columns and two classes for each site."""
    draw = np.random.default_rng(7)
    return {
        name: (
            np.c_[draw.normal(50 + number, 9, 24), draw.lognormal(2, 1, 24)].astype(np.float32),
            np.arange(24) % 2,
        )
        for number, name in enumerate(names)
    }


class Accounted:
    """Federation as far as an account of waits needs it: its round, which takes exchanges in."""

    def __init__(self, names: Collection[str] = NAMES) -> None:
        settings, self.turns, self.clock = RoundSettings(grace_s=0.5), Turns(), Clock()
        self.settings, self.round = SimpleNamespace(round=settings), Round(connected=frozenset(names))
        self.rules = Rules(settings, Synchronous(settings, 0, secure=True))
        self.attempted, self.exchanged = list[Attempted](), list[Exchanged]()

    @property
    def charged(self) -> list[tuple[str, list[str]]]:
        """The exchanges in which devices made others wait, with these devices."""
        return [(event.kind, list(event.costs)) for event in self.exchanged if event.costs]

    async def note(self, event: Attempted | Exchanged) -> bool:
        self.round = step(self.rules, self.round, event).state
        (self.attempted if isinstance(event, Attempted) else self.exchanged).append(event)  # type: ignore[attr-defined]
        return False


def survey_of(
    streams: Streams,
    privacy: PrivacySettings | None = None,
    data: DataSettings | None = None,
    blobs: MemoryBlobs | None = None,
    books: Accounted | None = None,
) -> Survey:
    """Return the survey of a server."""
    state: Any = books or Accounted()
    state.settings.privacy, state.settings.data = privacy or PrivacySettings(), data or DataSettings()
    state.streams, state.storage, state.executors = streams, SimpleNamespace(blobs=blobs or MemoryBlobs()), InlineExecutors()
    return Survey(state, "fed", state.note)


class MaskedSite:
    """One device, whose store outlives its process."""

    def __init__(self, name: str, data: Any, **options: Any) -> None:
        self.name, self.shard = name, data if isinstance(data, LazyShard) else shard_of(name, data)
        given = {"disclose": ("masked-statistics",)} | options
        self.options = DeviceOptions(Path(), ServerAddress("localhost", 1), Path(), **given)
        self.store, self.said = MemoryStore(), list[Answer]()
        self.restart()

    def restart(self) -> None:
        """Begin again with what is durable alone."""
        identity = Identity(self.name, credential_of(self.name), the_authority().pem)
        link = cast(Any, SimpleNamespace(name=self.name, identity=identity, answer=self.said.append))
        worker = InlineWorker(lambda: False, 0)
        self.discloser = Discloser(self.options, self.shard, self.store, link, worker, lambda line: None)

    async def takes(self, message: Any) -> list[Answer]:
        """Give the device a message, and return what it answers."""
        self.said.clear()
        if isinstance(message, StatisticsRequest):
            await self.discloser.answer(message, Gate(self.options))
        else:
            await self.discloser.exchange(message, Gate(self.options))
        return list(self.said)


class MaskedFleet:
    """Devices on the streams of a server. `change` may alter or drop what the server sends."""

    def __init__(
        self, data: Mapping[str, Any] | None = None, change: Change | None = None, privacy: PrivacySettings = PRIVACY
    ) -> None:
        self.sites = {name: MaskedSite(name, given) for name, given in (data or tables()).items()}
        self.change, self.blobs, self.privacy = change or (lambda name, message: message), MemoryBlobs(), privacy
        self.asked: list[tuple[str, str]] = []
        self.begin()

    def begin(self) -> None:
        """Begin a process of the server with what is durable alone."""
        self.streams, self.books = Streams(), Accounted()
        self.survey = survey_of(self.streams, self.privacy, blobs=self.blobs, books=self.books)
        for name, site in self.sites.items():
            known = (MASKED, MASKED_SCALE) if site.options.disclose else ()
            self.streams.enter(Stream(name, site.shard.profile, known=known))

    async def _serve(self, site: MaskedSite) -> None:
        stream = self.streams.get(site.name)
        assert stream is not None
        while (message := await stream.next()) is not None:
            if isinstance(message, SecureMessage):
                self.asked.append((site.name, message.exchange))
            message = self.change(site.name, message)
            for answer in [] if message is None else await site.takes(message):
                self.take(site.name, answer)

    def take(self, name: str, answer: Answer) -> None:
        if isinstance(answer, StatisticsReport):
            self.survey.reported(name, answer)
            return
        with suppress(UpdateRefused):
            self.survey.answered(name, answer)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        tasks = [asyncio.ensure_future(self._serve(site)) for site in self.sites.values()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    async def run(self, wanted: Sequence[str] = (), wait_s: float = 20.0) -> FleetStatistics:
        with self.at_work():
            return await self.survey.run(wanted, wait_s)


def joined(names: Sequence[str], place: int) -> np.ndarray:
    """Return one column of these sites together, float64."""
    return np.concatenate([tables()[name][0][:, place] for name in names]).astype(np.float64)
