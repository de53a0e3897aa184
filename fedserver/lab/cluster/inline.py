"""A crew in this process, for tests: each worker is a Hand, and nothing that is sent is shared."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from attune.fedserver.lab.cluster.crew import Gone, Unavailable
from attune.fedserver.lab.cluster.hand import Hand

Call = tuple[int, str, tuple[Any, ...]]  # the worker's number, from 0 as they were hired; the method; the arguments


class InlineTicket:
    """Implements crew.Ticket. The work is done when it, or what was asked later, is waited for."""

    def __init__(self, worker: InlineWorker, call: Call) -> None:
        self.call, self._worker = call, worker
        self.result: Any = None
        self.error: Exception | None = None

    def answer(self) -> Any:
        self._worker.work_until(self)
        if self.error is not None:
            raise self.error
        return deepcopy(self.result)


class InlineWorker:
    """Implements crew.Worker."""

    def __init__(self, crew: InlineCrew, number: int) -> None:
        self.hand, self._crew, self._number = Hand(crew.threads), crew, number
        self._waiting: list[InlineTicket] = []
        self.dead = False

    def ask(self, method: str, *arguments: Any) -> InlineTicket:
        self._waiting.append(InlineTicket(self, (self._number, method, deepcopy(arguments))))
        return self._waiting[-1]

    def work_until(self, ticket: InlineTicket) -> None:
        """What was asked up to this, in its order; each once."""
        while ticket in self._waiting:
            self._work(self._waiting.pop(0))

    def _work(self, ticket: InlineTicket) -> None:
        _, method, arguments = ticket.call
        self._crew.calls.append(ticket.call)
        self.dead = self.dead or self._crew.dies(ticket.call)
        try:
            if self.dead:
                raise Gone(f"worker {self._number} was told to die")
            ticket.result = getattr(self.hand, method)(*arguments)
        except Gone as gone:
            ticket.error = gone
        except Exception as error:
            ticket.error = Unavailable(f"a worker failed: {error!r}")

    def end(self) -> None:
        self.dead = True


class InlineCrew:
    """Implements crew.Crew. dies: whether a worker dies of a call. calls: all that was asked. hires: how many there may be."""

    def __init__(
        self, size: int, threads: int = 1, dies: Callable[[Call], bool] = lambda call: False, hires: int = 100
    ) -> None:
        self.size, self.threads, self.dies, self._hires = size, threads, dies, hires
        self.calls: list[Call] = []
        self.workers: list[InlineWorker] = []
        self.closed = False

    def __repr__(self) -> str:
        return f"<InlineCrew of {self.size}>"

    def hire(self) -> InlineWorker:
        if len(self.workers) == self._hires:
            raise Unavailable("no more workers are to be had")
        self.workers.append(InlineWorker(self, len(self.workers)))
        return self.workers[-1]

    def close(self) -> None:
        self.closed = True
