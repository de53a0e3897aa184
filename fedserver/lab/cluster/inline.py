"""A crew in this process, for tests: each worker is a Hand, and nothing that is sent is shared."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from attune.fedserver.lab.cluster.crew import Gone, Unavailable
from attune.fedserver.lab.cluster.hand import Hand

Call = tuple[int, str, tuple[Any, ...]]  # the worker's number, from 0 as they were hired; the method; the arguments


class InlineTicket:
    """Implements crew.Ticket. The work is done when it is waited for."""

    def __init__(self, worker: InlineWorker, call: Call) -> None:
        self._worker, self._call = worker, call

    def answer(self) -> Any:
        return self._worker.answer(self._call)


class InlineWorker:
    """Implements crew.Worker."""

    def __init__(self, crew: InlineCrew, number: int) -> None:
        self._crew, self._number, self._hand = crew, number, Hand(crew.threads)
        self.dead = False

    def ask(self, method: str, *arguments: Any) -> InlineTicket:
        return InlineTicket(self, (self._number, method, deepcopy(arguments)))

    def answer(self, call: Call) -> Any:
        _, method, arguments = call
        self._crew.calls.append(call)
        self.dead = self.dead or self._crew.dies(call)
        if self.dead:
            raise Gone(f"worker {self._number} was told to die")
        return deepcopy(getattr(self._hand, method)(*arguments))

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
