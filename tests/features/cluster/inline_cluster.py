"""A cluster in this process: each worker is a StoreWorker with copies of its own, and dies when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from attune.features.cluster.worker_pool import PASSED_ON, ClusterUnusable, WorkerLost
from attune.features.cluster.workers import StoreWorker

Call = tuple[int, str, tuple[Any, ...]]  # number of the worker, from 0 in the order of starts; the method; the arguments


class InlineCall:
    """Stand-in for ray_cluster.RayCall. The work is done when this or a later result of the worker is awaited."""

    def __init__(self, worker: InlineWorker, call: Call) -> None:
        self.call, self._worker = call, worker
        self.value: Any = None
        self.error: Exception | None = None

    def result(self) -> Any:
        self._worker.work_until(self)
        if self.error is not None:
            raise self.error
        return deepcopy(self.value)


class InlineWorker:
    """Stand-in for ray_cluster.RayWorkerHandle."""

    def __init__(self, cluster: InlineCluster, number: int) -> None:
        self.worker, self._cluster, self._number = StoreWorker(cluster.threads), cluster, number
        self._waiting: list[InlineCall] = []
        self.dead = False

    def call(self, method: str, *arguments: Any) -> InlineCall:
        self._waiting.append(InlineCall(self, (self._number, method, deepcopy(arguments))))
        return self._waiting[-1]

    def work_until(self, call: InlineCall) -> None:
        """Do the work up to this call, in order and once."""
        while call in self._waiting:
            self._work(self._waiting.pop(0))

    def _work(self, pending: InlineCall) -> None:
        _, method, arguments = pending.call
        self._cluster.calls.append(pending.call)
        self.dead = self.dead or self._cluster.dies(pending.call)
        try:
            if self.dead:
                raise WorkerLost(f"worker {self._number} was told to die")
            pending.value = getattr(self.worker, method)(*arguments)
        except WorkerLost as lost:
            pending.error = lost
        except PASSED_ON as error:
            pending.error = error
        except Exception as error:
            pending.error = ClusterUnusable(f"a worker failed: {error!r}")

    def end(self) -> None:
        self.dead = True


class InlineCluster:
    """Stand-in for ray_cluster.RayCluster.

    Args:
        size: Number of workers.
        dies: Whether a worker dies of a call.
        starts: How many workers can be started in all.
    """

    def __init__(
        self, size: int, threads: int = 1, dies: Callable[[Call], bool] = lambda call: False, starts: int = 100
    ) -> None:
        self.size, self.threads, self.dies, self._starts = size, threads, dies, starts
        self.calls: list[Call] = []
        self.shared: list[Any] = []
        self.workers: list[InlineWorker] = []
        self.closed = False

    def start_worker(self) -> InlineWorker:
        if len(self.workers) == self._starts:
            raise ClusterUnusable("no more workers are to be had")
        self.workers.append(InlineWorker(self, len(self.workers)))
        return self.workers[-1]

    def share(self, value: Any) -> Any:
        self.shared.append(value)
        return value

    def close(self) -> None:
        self.closed = True
