"""One process that holds learners, seen from its parent: asks it one thing at a time, and starts it again when it has died."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from threading import Lock

from attune.common.errors import SettingError
from attune.fedclient.work.processes.messages import Answer, Clear, Cleared, Progressed, Request, Stop
from attune.fedclient.work.processes.pipe import receive, send
from attune.fedclient.work.trainer import Progress
from attune.fedclient.work.worker import Died, Lost

LOOKED_S = 0.1  # seconds between two looks whether what waits for an answer was stopped
PROGRAM = "import sys; from attune.fedclient.work.processes.child import main; main(int(sys.argv[1]))"

_idle: list[Process] = []  # of pools that are over, for the next one: an import of torch takes seconds


def process() -> Process:
    """One that holds nothing: new, or of a pool that is over. Errors: SettingError where there are none."""
    while _idle:
        found = _idle.pop()
        if found.cleared():
            return found
    return Process()


class Process:
    """Started at once, and again when it has died: `life` counts. Several threads may ask.

    It is not one of multiprocessing's: those import the parent's script again, so a script without a guard would run twice.
    """

    def __init__(self) -> None:
        if sys.platform == "win32":
            raise SettingError("devices cannot be spread over processes on this system: use another executor")
        self.life, self._dropped, self._lock, self._closed = 0, set[str](), Lock(), False
        self._start()

    def __repr__(self) -> str:
        return f"<Process {self._process.pid}, life {self.life}>"

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        mine, its = Pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(its.fileno())],
            env=environment, pass_fds=(its.fileno(),), stdin=subprocess.DEVNULL,
        )  # fmt: skip
        its.close()
        self._end: Connection = mine
        self.life += 1

    def drop(self, name: str) -> None:
        """The learner of this device goes, at the next request. Waits for nothing."""
        self._dropped.add(name)

    def ask(self, life: int, request: Request, progress: Progress, cancelled: Callable[[], bool]) -> Answer:
        """Its answer. Errors: Lost if this life is over; Died if it ends before the answer: then the next one has begun."""
        with self._lock:
            if life != self.life:
                raise Lost("the process that held this device has died")
            try:
                send(self._end, (self._some_dropped(request.name), request))
                return self._answer(progress, cancelled)
            except (EOFError, OSError):
                raise Died(f"the process that held this device has died ({self._again()})") from None

    def _some_dropped(self, name: str) -> set[str]:
        self._dropped.discard(name)
        some, self._dropped = self._dropped, set()
        return some

    def _answer(self, progress: Progress, cancelled: Callable[[], bool]) -> Answer:
        stopped = False
        while True:
            if not self._end.poll(LOOKED_S):
                if not stopped and cancelled():
                    stopped = True
                    send(self._end, Stop())
                continue
            message = receive(self._end)
            if not isinstance(message, Progressed):
                answer: Answer = message
                return answer
            progress(message.share)

    def _again(self) -> str:
        """Starts the next life, unless it was ended on purpose; how the last one ended."""
        self._end.close()
        self._process.kill()
        code = self._process.wait()
        if not self._closed:
            self._dropped = set()
            self._start()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def cleared(self) -> bool:
        """Whether it lives, and holds nothing now."""
        try:
            return isinstance(self.ask(self.life, Clear(tuple(sys.path)), lambda share: None, lambda: False), Cleared)
        except Lost:
            return False

    def close(self) -> None:
        """It serves this pool no longer. One that is at work is ended; what it has committed to disk stays."""
        if not self._closed and self._lock.acquire(blocking=False):
            self._lock.release()
            if self.cleared():
                _idle.append(self)
            return
        self._closed = True
        self._process.kill()
        self._process.wait()
