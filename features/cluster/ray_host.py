"""A worker of a Ray cluster that holds learners: it gets one request at a time, and is started again when it has died.

Everything between the two ends travels as it does between processes of one machine (pipe.py): a cluster is one operator's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import ray
from ray.exceptions import RayError

from attune.fedclient.work.processes.pipe import receive, send
from attune.fedclient.work.processes.remote_executor import LearnerHost
from attune.fedclient.work.processes.requests import HostAnswer, HostRequest
from attune.fedclient.work.trainer import OnProgress

if TYPE_CHECKING:
    from attune.fedclient.work.processes.hosted import HostedLearners

CHECK_S = 0.5  # seconds between two checks how far the order at hand is, and whether it was cancelled
METHODS = {"answer": "answers", "watch": "watches"}  # each group has a thread of its own
ByteArrays = Sequence[Any]  # Ray hands large ones over in shared memory


class RecordedMessage:
    """A message as arrays of bytes. It stands in for the end of a pipe, which sends or receives it."""

    def __init__(self, arrays: ByteArrays = ()) -> None:
        self.arrays = list(arrays)
        self._read = iter(arrays)

    def send_bytes(self, buf: Any) -> None:
        self.arrays.append(np.frombuffer(buf, dtype=np.uint8))

    def recv_bytes(self) -> Any:
        return next(self._read).data


def written(message: object) -> ByteArrays:
    """Return the message for the other end to read; large tensors are not copied."""
    record = RecordedMessage()
    send(record, message)
    return record.arrays


def read(arrays: ByteArrays) -> Any:
    """Return the message that was written, with tensors of its own."""
    return receive(RecordedMessage(arrays))


class RayLearners:
    """Methods of the worker. `answer` and `watch` have a thread each, so that work can be followed and cancelled."""

    def __init__(self) -> None:
        from attune.fedclient.work.processes.hosted import HostedLearners

        self._learners: HostedLearners = HostedLearners()
        self._stopped, self._share = False, 0.0

    def answer(self, arrays: ByteArrays) -> ByteArrays:
        dropped, request = read(arrays)
        self._stopped, self._share = False, 0.0
        self._learners.drop(dropped)
        return written(self._learners.answer(request, self._progressed, lambda: self._stopped))

    def watch(self, stop: bool) -> float:
        """Return the share that is done."""
        self._stopped = self._stopped or stop
        return self._share

    def _progressed(self, share: float) -> None:
        self._share = share


@cache
def _remote() -> Any:
    methods = {name: ray.method(concurrency_group=group)(getattr(RayLearners, name)) for name, group in METHODS.items()}
    worker = type("RayLearners", (RayLearners,), methods)
    return ray.remote(num_cpus=1, max_restarts=0, concurrency_groups=dict.fromkeys(METHODS.values(), 1))(worker)


class RayHost(LearnerHost):
    """A worker of the Ray cluster that this process is connected to."""

    called, failures = "Ray worker", (RayError,)

    def _start(self) -> None:
        self.worker = _remote().remote()
        self.life += 1

    def _exchange(
        self, message: tuple[set[str], HostRequest], progress: OnProgress, cancelled: Callable[[], bool]
    ) -> HostAnswer:
        waited = self.worker.answer.remote(written(message))
        while not ray.wait([waited], timeout=CHECK_S)[0]:
            if share := ray.get(self.worker.watch.remote(cancelled())):
                progress(share)
        return cast(HostAnswer, read(ray.get(waited)))

    def _restart(self, error: Exception) -> str:
        """Start a new worker, and return why, as LearnerHost._restart.

        A worker that looks dead may only be unreachable, so it is ended: no work is done twice.
        """
        ray.kill(self.worker)
        self._dropped = set()
        if not self._closed:
            self._start()
        if self._closed:  # perhaps while it started: the worker would keep its processor
            ray.kill(self.worker)
        return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

    def close(self) -> None:
        """End the worker, also while another thread waits for its answer; no further life begins."""
        self._closed = True
        ray.kill(self.worker)
