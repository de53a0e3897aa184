"""The program of a process that holds learners: answers one request after the other until its parent is gone."""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection

from attune.fedclient.work.processes.messages import Progressed, Stop
from attune.fedclient.work.processes.pipe import receive, send
from attune.fedclient.work.processes.seats import Seats

LOOKED_S = 0.05  # seconds between two looks whether the work at hand is to be given up
TOLD_S = 1.0  # seconds between two reports of progress


def main(descriptor: int) -> None:
    """Speaks over this open socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    end, seats = Connection(descriptor), Seats()
    try:
        while True:
            message = receive(end)
            if isinstance(message, Stop):
                continue  # what it meant was done already
            dropped, request = message
            seats.drop(dropped)
            watch = _Watch(end)
            send(end, seats.answer(request, watch.progress, watch.cancelled))
    except (EOFError, OSError):
        return  # the parent is gone


class _Watch:
    """The other end, while something is carried out."""

    def __init__(self, end: Connection) -> None:
        self._end, self._stopped = end, False
        self._looked = self._told = time.monotonic()

    def cancelled(self) -> bool:
        """Whether the other end has said so, or is gone."""
        now = time.monotonic()
        if not self._stopped and now - self._looked >= LOOKED_S:
            self._looked = now
            self._stopped = self._end.poll()
        return self._stopped

    def progress(self, share: float) -> None:
        now = time.monotonic()
        if now - self._told >= TOLD_S:
            self._told = now
            send(self._end, Progressed(share))
