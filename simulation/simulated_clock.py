"""A clock for simulations: devices of different speed, or the order of arrivals of an earlier run.

Nothing waits in real time. Of all devices that hold an order, the one whose answer comes first on this clock works next.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from attune.common.errors import FederationFailed, SettingError
from attune.common.exchange.messages import Order
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.executor import Work
from attune.fedserver.core.records import Report
from attune.simulation.in_process import InlineWorker

LOOK_S = 0.01  # real seconds until the next look at a server that is making a state
Arrival = tuple[str, int]  # a device, and the round of the order that it has handed in
Held = Callable[[], Mapping[str, str] | None]


class SimulatedClock:
    """Time in a simulation: when each order of training is answered. Evaluations take no time.

    After a run, `closed` has the simulated time at which each round was closed.

    Args:
        seconds: Seconds of an order of training: for each device by name, or a function of the device and the order's round.
            None: one second for all.
        arrivals: The order of arrivals of a run with buffered rounds (`arrivals_of`), to repeat it: with the same settings
            and shards it gives the same bits. All devices must have been there from the start, and each buffer full.
    """

    def __init__(
        self,
        seconds: Mapping[str, float] | Callable[[str, int], float] | None = None,
        arrivals: Sequence[Arrival] | None = None,
    ) -> None:
        if seconds is not None and arrivals is not None:
            raise SettingError("a simulated clock takes the seconds of devices, or the order of their arrivals: not both")
        self._seconds = seconds
        self._places = None if arrivals is None else {arrival: place for place, arrival in enumerate(arrivals)}
        self.now = 0.0
        self.closed: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"SimulatedClock(now={self.now:g}, {len(self.closed)} rounds closed)"

    def ends_at(self, name: str, order: Order) -> float:
        """Return when the device answers an order that it gets now.

        Raises:
            SettingError: There are no seconds for this device.
        """
        if order.work == "evaluate":
            return self.now
        if self._places is not None:
            return float(self._places.get((name, order.round), math.inf))
        if self._seconds is None:
            return self.now + 1.0
        if callable(self._seconds):
            return self.now + self._seconds(name, order.round)
        if name not in self._seconds:
            raise SettingError(f"the simulated clock has no seconds for {name}: name every device")
        return self.now + self._seconds[name]

    def note(self, closed: int) -> None:
        """Note that so many rounds are closed now."""
        if closed and closed not in self.closed:
            self.closed[closed] = self.now


def arrivals_of(rows: Iterable[Report]) -> list[Arrival]:
    """Return the order in which the updates of buffered rounds arrived, from the reports of a run."""
    counted = [row for row in rows if row.arrival is not None and row.staleness is not None]
    counted.sort(key=lambda row: (row.round, row.arrival))
    return [(row.client, row.round - (row.staleness or 0)) for row in counted]


@dataclass(frozen=True)
class _Turn:
    """A device that waits until the answer to its order is due."""

    order_id: str
    ends_at: float
    begins: asyncio.Future[None]


class ClockedWorker(InlineWorker):
    """Worker that carries out orders in the order of a simulated clock.

    Args:
        stopped: Returns whether the work must be given up.
        awake_bytes: Most bytes that learners of waiting devices may hold in memory.
        clock: The clock.
        held: Returns the id of the order that each device holds, by name; None while the server makes a state.
        closed: Returns how many rounds are closed.
    """

    def __init__(
        self, stopped: Callable[[], bool], awake_bytes: float, clock: SimulatedClock, held: Held, closed: Callable[[], int]
    ) -> None:
        super().__init__(stopped, awake_bytes)
        self._clock, self._held, self._closed = clock, held, closed
        self._turns: dict[str, _Turn] = {}
        self._look: asyncio.TimerHandle | None = None

    async def carry_out(self, work: Work) -> OrderResult:
        loop, name = asyncio.get_running_loop(), work.learner.name
        turn = _Turn(work.order.id, self._clock.ends_at(name, work.order), loop.create_future())
        self._turns[name] = turn
        self.answered()
        try:
            await turn.begins
        finally:
            if self._turns.get(name) is turn:
                del self._turns[name]
        return await super().carry_out(work)

    def answered(self) -> None:
        """Let the next device work, if every device that holds an order waits for its turn."""
        self._clock.note(self._closed())
        held = self._held()
        waiting = {name: turn for name, turn in self._turns.items() if not turn.begins.done()}
        due = [(turn.ends_at, name) for name, turn in waiting.items() if held and held.get(name) == turn.order_id]
        if held is None or len(due) < len(held):
            if waiting and self._look is None:  # the server, or a device that is about to wait, is at work
                self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)
            return
        if due:
            ends_at, name = min(due)
            if ends_at == math.inf:
                failed = FederationFailed(f"the order of arrivals cannot be followed further: none of {sorted(held)} is next")
                waiting[name].begins.set_exception(failed)
                return
            self._clock.now = max(self._clock.now, ends_at)
            waiting[name].begins.set_result(None)

    def _look_again(self) -> None:
        self._look = None
        self.answered()
