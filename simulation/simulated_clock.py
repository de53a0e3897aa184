"""A clock for simulations: devices of different speed, or the order of arrivals of an earlier run.

Nothing waits in real time. Of all devices that hold an order, the one whose answer comes first on this clock works next.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from attune.common.errors import SettingError
from attune.common.exchange.messages import Order
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.executor import Work
from attune.fedserver.core.records import Arrival
from attune.simulation.in_process import InlineWorker

LOOK_S = 0.01  # real seconds until the next look at a server that is making a state
Held = Callable[[], Mapping[str, str] | None]


class SimulatedClock:
    """Time in a simulation: when each order of training is answered. Evaluations take no time.

    After a run, `closed` has the simulated time at which each round was closed.

    Args:
        seconds: Seconds of an order of training: for each device by name, or a function of the device and the order's round.
            None: one second for all.
        arrivals: The order of arrivals of a run with buffered rounds (`arrivals_of`), to repeat it: with the same settings
            and shards it gives the same bits. Devices that joined later join in the round of their first order. No time passes.
            What a device trained for updates that did not count is not repeated; it is missing in `private` parts alone.
    """

    def __init__(
        self,
        seconds: Mapping[str, float] | Callable[[str, int], float] | None = None,
        arrivals: Sequence[Arrival] | None = None,
    ) -> None:
        if seconds is not None and arrivals is not None:
            raise SettingError("a simulated clock takes the seconds of devices, or the order of their arrivals: not both")
        self._seconds = seconds
        self.arrivals = arrivals
        self._places = {(arrival.device, arrival.order): float(place) for place, arrival in enumerate(arrivals or ())}
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
        if self.arrivals is not None:
            return self._places.get((name, order.round), math.inf)  # newcomers train after the log
        if self._seconds is None:
            return self.now + 1.0
        if callable(self._seconds):
            return self.now + self._seconds(name, order.round)
        if name not in self._seconds:
            raise SettingError(f"the simulated clock has no seconds for {name}: name every device")
        return self.now + self._seconds[name]

    def advance(self, until: float) -> None:
        """Let time pass, unless an earlier run is repeated: its log alone decides then."""
        if self.arrivals is None:
            self.now = max(self.now, until)

    def note(self, closed: int) -> None:
        """Note that so many rounds are closed now."""
        if closed and closed not in self.closed:
            self.closed[closed] = self.now


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
        held: Returns the id of the order that each device holds, by name; None while the server makes a state or a device
            joins.
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
            # The server, a device that joins, or one that is about to wait is at work.
            if (waiting or held is None) and self._look is None:
                self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)
            return
        if due:
            ends_at, name = min(due)
            self._clock.advance(ends_at)
            waiting[name].begins.set_result(None)

    def _look_again(self) -> None:
        self._look = None
        self.answered()
