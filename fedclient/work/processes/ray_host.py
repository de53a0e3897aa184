"""One worker of a Ray cluster that holds learners: asked one thing at a time, and started again when it has died.

Everything between the two ends travels as it does between processes of one machine (pipe.py): a cluster is one operator's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayError

from attune.fedclient.work.processes.messages import Answer, Request
from attune.fedclient.work.processes.pipe import receive, send
from attune.fedclient.work.trainer import Progress
from attune.fedclient.work.worker import Died, Lost

if TYPE_CHECKING:
    from attune.fedclient.work.processes.seats import Seats

LOOKED_S = 0.5  # seconds between two looks whether what waits for an answer was stopped, and how far it is
METHODS = {"answer": "answers", "watch": "watches"}  # each group has a thread of its own
Pieces = Sequence[Any]  # arrays of bytes: Ray hands large ones over in shared memory


class Letter:
    """A message in pieces, in place of the open end of a pipe."""

    def __init__(self, pieces: Pieces = ()) -> None:
        self.pieces = list(pieces)
        self._read = iter(pieces)

    def __repr__(self) -> str:
        return f"<Letter of {len(self.pieces)} pieces>"

    def send_bytes(self, buf: Any) -> None:
        self.pieces.append(np.frombuffer(buf, dtype=np.uint8))

    def recv_bytes(self) -> Any:
        return next(self._read).data


def written(message: object) -> Pieces:
    """For the other end to read, once it has been handed over: large tensors are not copied."""
    letter = Letter()
    send(letter, message)
    return letter.pieces


def read(pieces: Pieces) -> Any:
    """What was written; its tensors are its own."""
    return receive(Letter(pieces))


class Holder:
    """What lives in the worker. `answer` and `watch` have a thread each: work can be followed and stopped."""

    def __init__(self) -> None:
        from attune.fedclient.work.processes.seats import Seats

        self._seats: Seats = Seats()
        self._stopped, self._share = False, 0.0

    def answer(self, pieces: Pieces) -> Pieces:
        dropped, request = read(pieces)
        self._stopped, self._share = False, 0.0
        self._seats.drop(dropped)
        return written(self._seats.answer(request, self._progressed, lambda: self._stopped))

    def watch(self, stop: bool) -> float:
        """The share that is done."""
        self._stopped = self._stopped or stop
        return self._share

    def _progressed(self, share: float) -> None:
        self._share = share


@cache
def _remote() -> Any:
    methods = {name: ray.method(concurrency_group=group)(getattr(Holder, name)) for name, group in METHODS.items()}
    worker = type("Holder", (Holder,), methods)
    return ray.remote(num_cpus=1, max_restarts=0, concurrency_groups=dict.fromkeys(METHODS.values(), 1))(worker)


class RayHost:
    """Implements fedclient.work.processes.pool.Host. Several threads may ask. Ray must be connected to its cluster."""

    def __init__(self) -> None:
        self.life, self._dropped, self._lock = 0, set[str](), Lock()
        self._closed = False
        self._start()

    def __repr__(self) -> str:
        return f"<RayHost, life {self.life}>"

    def _start(self) -> None:
        self.worker = _remote().remote()
        self.life += 1

    def drop(self, name: str) -> None:
        """The learner of this device goes, at the next request. Waits for nothing."""
        self._dropped.add(name)

    def ask(self, life: int, request: Request, progress: Progress, cancelled: Callable[[], bool]) -> Answer:
        """Its answer. Errors: Lost if this life is over; Died if it ends before the answer: then the next one has begun."""
        with self._lock:
            if life != self.life:
                raise Lost("the Ray worker that held this device has died")
            self._dropped.discard(request.name)
            some, self._dropped = self._dropped, set()
            try:
                answer: Answer = read(self._answer(written((some, request)), progress, cancelled))
                return answer
            except RayError as error:
                self._again()
                raise Died(f"the Ray worker that held this device has died ({_reason(error)})") from None

    def _answer(self, pieces: Pieces, progress: Progress, cancelled: Callable[[], bool]) -> Pieces:
        waited = self.worker.answer.remote(pieces)
        while not ray.wait([waited], timeout=LOOKED_S)[0]:
            if share := ray.get(self.worker.watch.remote(cancelled())):
                progress(share)
        found: Pieces = ray.get(waited)
        return found

    def _again(self) -> None:
        """Starts the next life. What looked dead may only be out of reach: it is ended, so that nobody works twice."""
        ray.kill(self.worker)
        self._dropped = set()
        if not self._closed:
            self._start()
        if self._closed:  # maybe while it started: a worker that nobody ends would keep its processor
            ray.kill(self.worker)

    def close(self) -> None:
        """Also while another thread asks: no further life begins."""
        self._closed = True
        ray.kill(self.worker)


def _reason(error: RayError) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
