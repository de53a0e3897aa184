"""A process that holds learners, seen from its parent: it gets one request at a time, and is started again when it has died."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import cast

from attune.common.errors import SettingError
from attune.fedclient.work.executor import HostLost
from attune.fedclient.work.objectives.base import OnProgress
from attune.fedclient.work.processes.pipe import receive, send, start_helper
from attune.fedclient.work.processes.remote_executor import LearnerHost
from attune.fedclient.work.processes.requests import ForgetAll, Forgotten, GiveUpWork, HostAnswer, HostRequest, WorkProgress

CHECK_S = 0.1  # seconds between two checks whether the order at hand was cancelled
PROGRAM = "import sys; from attune.fedclient.work.processes.hosted import main; main(int(sys.argv[1]))"

_idle: list[ProcessHost] = []  # of closed executors, for the next one: importing torch takes seconds


def process_host() -> ProcessHost:
    """Return a process that holds no learner: a new one, or one of an executor that is closed.

    Raises:
        SettingError: This system has no such processes.
    """
    while _idle:
        host = _idle.pop()
        if host.emptied():
            return host
    return ProcessHost()


class ProcessHost(LearnerHost):
    """A process of this machine."""

    called, failures = "process", (EOFError, OSError)

    def __init__(self) -> None:
        if sys.platform == "win32":
            raise SettingError("devices cannot be spread over processes on this system: use another executor")
        super().__init__()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        self._process, self._end = start_helper(PROGRAM)
        self.life += 1

    def _exchange(
        self, message: tuple[set[str], HostRequest], progress: OnProgress, cancelled: Callable[[], bool]
    ) -> HostAnswer:
        send(self._end, message)
        stopped = False
        while True:
            if not self._end.poll(CHECK_S):
                if not stopped and cancelled():
                    stopped = True
                    send(self._end, GiveUpWork())
                continue
            answer = receive(self._end)
            if not isinstance(answer, WorkProgress):
                return cast(HostAnswer, answer)
            progress(answer.share)

    def _restart(self, error: Exception) -> str:
        self._end.close()
        self._process.kill()
        code = self._process.wait()
        if not self._closed:
            self._dropped = set()
            self._start()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def emptied(self) -> bool:
        """Drop all learners, and return whether the process lives."""
        try:
            return isinstance(self.ask(self.life, ForgetAll(tuple(sys.path)), lambda share: None, lambda: False), Forgotten)
        except HostLost:
            return False

    def close(self) -> None:
        """Serve this executor no longer. A process at work is ended; what it has committed to disk stays."""
        if not self._closed and self._lock.acquire(blocking=False):
            self._lock.release()
            if self.emptied():
                _idle.append(self)
            return
        self._closed = True
        self._process.kill()
        self._process.wait()
