"""The workers of a lab as seats: a worker that dies is replaced, and what a worker holds is known here."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attune.fedserver.lab.cluster.crew import Crew, Gone, Unavailable

LOG = logging.getLogger("fedserver")
DEATHS = 3  # of workers in a row at the same task: then it is the task that kills them
REPLACED = "a worker of the lab is replaced, and its step done again: %s"
NOTICE = (
    "the cluster of --lab is not used any more (%s). This server goes on by itself, with the same results; nothing is lost. "
    "To use a cluster again, start the server again"
)
Place = tuple[str, int, str]  # part, parcel, vault key


@dataclass(frozen=True)
class Holding:
    """A worker's columns of a vault key. digest: of the whole blob that they are of."""

    digest: str
    size_bytes: int


class Seat:
    """One worker after the other; `life` counts. held: what the present one has, what was used last at the end."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.worker = crew.hire()
        self.life, self.load_bytes, self.kept_bytes = 0, 0, 0
        self.held: OrderedDict[Place, Holding] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Seat, life {self.life}, {len(self.held)} rows>"

    def replace(self, life: int) -> None:
        """A worker that holds nothing takes the place of the one of this life, unless one has. Errors: Unavailable."""
        if life == self.life:
            self.worker.end()
            self.held.clear()
            self.worker = self._crew.hire()
            self.life += 1

    def make_room(self, needed_bytes: int, used: set[Place]) -> list[Place]:
        """Forgets what was not used for longest, until as much more fits; returns it. `used` stays."""
        most = self.kept_bytes - needed_bytes
        dropped: list[Place] = []
        total = sum(holding.size_bytes for holding in self.held.values())
        for place in [place for place in self.held if place not in used]:
            if total <= most:
                break
            total -= self.held.pop(place).size_bytes
            dropped.append(place)
        return dropped


class Task:
    """One call of a seat's worker. If that dies, its successor is asked, which holds nothing: so the message is made again."""

    def __init__(self, seat: Seat, method: str, message: Callable[[Seat], Sequence[Any]]) -> None:
        self.seat, self._method, self._message = seat, method, message
        self._ask()

    def _ask(self) -> None:
        self.life = self.seat.life
        self._ticket = self.seat.worker.ask(self._method, *self._message(self.seat))

    def answer(self) -> Any:
        """Errors: Unavailable if it kills every worker."""
        for _ in range(DEATHS):
            try:
                return self._ticket.answer()
            except Gone as gone:
                LOG.warning(REPLACED, gone)
                self.seat.replace(self.life)
                self._ask()
        raise Unavailable(f"{DEATHS} workers in a row have ended at the same step")


class Team:
    """All seats, and which of them has which parcel: the one with the least, and then always that one."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self.seats = [Seat(crew) for _ in range(crew.size)]
        self.present = True  # whether the cluster is used
        self._seat_of: dict[tuple[str, int], Seat] = {}

    def __repr__(self) -> str:
        return f"<Team of {len(self.seats)}>"

    def seat(self, part: str, number: int, size_bytes: int) -> Seat:
        """Of a parcel, which has so many bytes of one client."""
        if (part, number) not in self._seat_of:
            found = min(self.seats, key=lambda seat: seat.load_bytes)
            found.load_bytes += size_bytes
            self._seat_of[part, number] = found
        return self._seat_of[part, number]

    def give_up(self, why: Unavailable) -> None:
        """The cluster is not used any more, and the log says so."""
        LOG.warning(NOTICE, why)
        self.present = False
        self._crew.close()

    def close(self) -> None:
        if self.present:
            self.present = False
            self._crew.close()
