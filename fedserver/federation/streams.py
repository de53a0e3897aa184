"""Devices as this process sees them, in memory only: the newest control stream of each, its activity, and who was revoked.

One thread writes. Any thread may read the activity, because it gets copies of values that never change.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache

from attune.common.errors import AttuneError, Replaced, Unreachable
from attune.common.exchange.messages import Beat, Farewell, ToDevice
from attune.common.plan import Profile
from attune.common.protocol import CHANGE, EMPTY
from attune.fedserver.core.messages import StrEnum

REVOKED = "the operator of this federation has revoked {}"


class RevokedDevices:
    """Devices that were revoked while this process runs, each with its error.

    A new process refuses them by their certificates.
    """

    def __init__(self) -> None:
        self._errors: dict[str, AttuneError] = {}

    def add(self, name: str, error: AttuneError) -> bool:
        """Add a device, and return whether it is new."""
        return self._errors.setdefault(name, error) is error

    def readmit(self, name: str) -> None:
        """Forget a name that another device has now. The revoked one is refused by its certificates."""
        self._errors.pop(name, None)

    def check(self, name: str) -> None:
        """Check that the device is not revoked.

        Raises:
            AttuneError: The error with which it was revoked.
        """
        if name in self._errors:
            raise self._errors[name]


MAX_UNSENT = 256  # messages to a device that does not read; then it is cut off
MOST_MOVES = 16  # a device of this version moves four times an order


class Stream:
    """Server's end of a control stream. The newest stream of a device owns its orders; an older one is closed."""

    __slots__ = (
        "_error", "_moves", "_progress", "_unsent", "_woken", "changes", "closed", "empty", "inline_bytes", "known", "name",
        "process", "profile", "software",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        profile: Profile,
        software: str = "",
        inline_bytes: int = 0,
        known: Collection[str] = (),
        process: str = "",
    ) -> None:
        self.name = name
        self.process = process  # a word that tells the device's processes apart; empty for older devices
        self.profile = profile
        self.software = software
        self.inline_bytes = inline_bytes  # of blobs that the device takes within an order
        self.changes = CHANGE in known  # whether the device accepts a delta from the value that it holds
        self.empty = EMPTY in known  # whether the device has lost what it had of the run
        self.known = _shared(frozenset(known))  # what the device can do (Hello.encodings)
        self._progress, self._moves = ("", 0.0), 0  # the order and the share of it that is done; how often that has changed
        self._unsent: list[ToDevice | Beat | None] = []  # an asyncio.Queue would take 3 KiB of each idle device
        self._woken: asyncio.Future[None] | None = None  # of `next`, which waits
        self._error: AttuneError | None = None
        self.closed = False

    def send(self, message: ToDevice) -> None:
        """Queue one message without waiting. A full queue closes the stream."""
        if self.closed:
            return
        if len(self._unsent) < MAX_UNSENT:
            self._put(message)
        else:
            self.close(
                Unreachable(f"{self.name} does not read what it is sent ({MAX_UNSENT} messages wait): it must reconnect")
            )

    def beat(self, beat: Beat) -> None:
        """Queue a beat if nothing else waits, which shows life as well."""
        if not self.closed and not self._unsent:
            self._put(beat)

    def moves_to(self, order_id: str, share: float) -> bool:
        """Note the share of an order that is done, and return whether to show it: at most MOST_MOVES changes of an order."""
        order, shown = self._progress
        if order != order_id:
            self._moves = 0
        elif share == shown or self._moves >= MOST_MOVES:
            return False
        self._progress, self._moves = (order_id, share), self._moves + 1
        return True

    def close(self, error: AttuneError | None = None) -> None:
        """End the stream, with `error` if there is one. Queued messages are dropped."""
        if self.closed:
            return
        self.closed, self._error = True, error
        self._unsent.clear()
        self._put(None)

    def _put(self, message: ToDevice | Beat | None) -> None:
        self._unsent.append(message)
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def next(self) -> ToDevice | Beat | None:
        """Return the next message to write, or None at the end.

        Raises:
            AttuneError: The error with which the stream was closed.
        """
        while not self._unsent:
            self._woken = asyncio.get_running_loop().create_future()
            try:
                await self._woken
            finally:
                self._woken = None
        message = self._unsent.pop(0)
        if message is None and self._error is not None:
            raise self._error
        return message


@lru_cache(maxsize=16)
def _shared(known: frozenset[str]) -> frozenset[str]:
    """Return one set for all devices that can do the same."""
    return known


class Streams:
    """Streams of the connected devices, in the order in which they connected."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self.dismissed: set[str] = set()  # devices that have had their farewell on their newest stream

    def __len__(self) -> int:
        return len(self._streams)

    def enter(self, stream: Stream) -> bool:
        """Make this the device's stream, and return whether an older one was closed for it."""
        older = self._streams.pop(stream.name, None)
        if older is not None:
            older.close(Replaced(f"{stream.name} opened a newer stream"))
        self._streams[stream.name] = stream
        self.dismissed.discard(stream.name)
        return older is not None

    def leave(self, stream: Stream) -> bool:
        """Remove the stream. Return False, without a change, if the device has a newer one."""
        stream.close()
        if not self.is_current(stream):
            return False
        del self._streams[stream.name]
        return True

    def get(self, name: str) -> Stream | None:
        return self._streams.get(name)

    def is_current(self, stream: Stream) -> bool:
        return self._streams.get(stream.name) is stream

    def profiles(self) -> dict[str, Profile]:
        """Return what the connected devices declared."""
        return {name: stream.profile for name, stream in self._streams.items()}

    def can(self, name: str, ability: str) -> bool:
        """Return whether a device is connected and lists an ability (common.protocol)."""
        return name in self._streams and ability in self._streams[name].known

    def send(self, name: str, message: ToDevice) -> None:
        """Queue a message for a device. It is dropped if the device is not connected."""
        if name in self._streams:
            self._streams[name].send(message)
            if isinstance(message, Farewell):
                self.dismissed.add(name)

    def hang_up(self) -> None:
        """End every stream, because the server stops. Devices return when there is a server again."""
        for stream in self._streams.values():
            stream.close()


KEPT_SPANS = 200  # of each device
KEPT_ROUNDS = 50


class DeviceStage(StrEnum):
    """Stage of a device's work."""

    WAITING = "waiting"
    DOWNLOADING = "downloading"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SENDING = "sending"
    ABSENT = "absent"
    FINISHED = "finished"


WORK = {"train": DeviceStage.TRAINING, "evaluate": DeviceStage.EVALUATING}


@dataclass(frozen=True, slots=True)
class Span:
    """Time in which a device was in `stage`: from the unix time `began_at` to that of its next span."""

    stage: DeviceStage
    began_at: float
    why: str = ""


class DeviceActivity:
    """Spans of all devices, and the times of the last closed rounds."""

    def __init__(self, unix: Callable[[], float]) -> None:
        self._unix = unix
        self._spans: dict[str, tuple[Span, ...]] = {}  # an idle device has one: a deque would take 700 bytes of each
        self._closed: deque[tuple[int, float]] = deque(maxlen=KEPT_ROUNDS)

    def enter(self, name: str, stage: DeviceStage, why: str = "") -> None:
        """Note that the device is in this stage now. Entering the same stage again changes only the reason."""
        spans = self._spans.get(name, ())
        if spans and spans[-1].stage is stage and why in ("", spans[-1].why):
            return
        self._spans[name] = (*spans[1 - KEPT_SPANS :], Span(stage, self._unix(), why))

    def stage(self, name: str) -> DeviceStage | None:
        """Return the stage of the device, or None if this process has not seen it."""
        return self._spans[name][-1].stage if name in self._spans else None

    def close_round(self, number: int) -> None:
        self._closed.append((number, self._unix()))

    @property
    def spans(self) -> dict[str, tuple[Span, ...]]:
        """Spans of each device that this process has seen, oldest first."""
        return dict(self._spans)

    def round_s(self) -> float | None:
        """Return the mean seconds of the last rounds, or None before two were closed."""
        closed = tuple(self._closed)
        return (closed[-1][1] - closed[0][1]) / (len(closed) - 1) if len(closed) > 1 else None
