"""Heads of a hypernetwork that one worker has, seen from the server: what the worker was told, told again to its successor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from attune.fedserver.lab.aggregators.network import Head
from attune.fedserver.lab.build import AggregatorSpec
from attune.fedserver.lab.cluster.crew import Gone, Ticket, Unavailable
from attune.fedserver.lab.cluster.team import DEATHS, REPLACED, Seat

LOG = logging.getLogger("fedserver")
Message = Callable[[], Sequence[Any]]


class Told:
    """One call. It is made again in every life of the worker in which its answer is needed."""

    def __init__(self, group: Group, method: str, message: Message, life: int = -1) -> None:
        self._group, self._method, self._message = group, method, message
        self._life = life  # in which it was told last
        self._ticket: Ticket | None = None  # None: it needs no answer in this life

    def tell(self) -> None:
        """Now. Errors: Unavailable."""
        seat = self._group.seat
        if self._life != seat.life:
            self._ticket = seat.worker.ask(self._method, self._group.name, *self._message())
            self._life = seat.life

    def answer(self) -> Any:
        """Errors: Unavailable if it kills every worker."""
        for _ in range(DEATHS):
            try:
                self._group.tell_again()
                self.tell()
                return self._ticket.answer() if self._ticket is not None else None
            except Gone as gone:
                LOG.warning(REPLACED, gone)
                self._group.seat.replace(self._life)
        raise Unavailable(f"{DEATHS} workers in a row have ended at the same step")


class Group:
    """Heads that follow one another, and their worker. log: what makes the state that it holds, since the vault had it."""

    def __init__(self, seat: Seat, job: AggregatorSpec, number: int, heads: Sequence[Head]) -> None:
        names = {name for head in heads for name in head.names}
        mine = {component: [name for name in own if name in names] for component, own in job.components.items()}
        self.job = AggregatorSpec(
            job.part, job.aggregator, job.settings, job.seed, {key: own for key, own in mine.items() if own}
        )
        self.seat, self.heads, self.name = seat, heads, (job.part, number)
        self._log: list[Told] = []
        self._life = -1

    def __repr__(self) -> str:
        return f"<Group {self.name} of {len(self.heads)} heads>"

    def settle(self) -> None:
        """Waits for all that was told: nothing of it has failed. Errors: Unavailable."""
        for told in self._log:
            told.answer()

    def saved(self, messages: Sequence[tuple[str, Message]]) -> None:
        """These alone make the state from now on. Nothing is told: the worker that lives has it."""
        self._log = [Told(self, method, message, self._life) for method, message in messages]

    def tell(self, method: str, message: Message) -> Told:
        """Changes what the worker holds. Waits for nothing. Errors: Unavailable."""
        self.tell_again()
        self._log.append(Told(self, method, message))
        self._log[-1].tell()
        return self._log[-1]

    def ask(self, method: str, *arguments: Any) -> Told:
        """Changes nothing. Waits for nothing. Errors: Unavailable."""
        self.tell_again()
        asked = Told(self, method, lambda: arguments)
        asked.tell()
        return asked

    def tell_again(self) -> None:
        """To a worker that is new: all that makes the state."""
        if self._life != self.seat.life:
            self._life = self.seat.life
            for told in self._log:
                told.tell()


def cut(heads: Sequence[Head], pieces: int) -> list[Sequence[Head]]:
    """Heads in their order, in at most so many groups of nearly the same number of generated weights."""
    total = sum(sum(head.sizes) for head in heads)
    groups: list[list[Head]] = [[] for _ in range(pieces)]
    before = 0
    for head in heads:
        size = sum(head.sizes)
        middle = (before + size / 2) / total if total else 0.0
        groups[min(pieces - 1, int(middle * pieces))].append(head)
        before += size
    return [group for group in groups if group]
