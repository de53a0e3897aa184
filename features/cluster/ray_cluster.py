"""Workers of a Ray cluster: each is an actor with a ClusterWorker. The one file of the server that imports Ray."""

from __future__ import annotations

import os
import warnings
from time import monotonic
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from attune.common.errors import SettingError
from attune.features.cluster.worker_pool import PASSED_ON, ClusterUnusable, WorkerLost, WorkerPool
from attune.features.cluster.workers import StoreWorker

if TYPE_CHECKING:
    from attune.features.cluster.server import RayLab

CHECK_S = 1.0  # seconds between two checks of a worker's heartbeat while its result is awaited
START_S = 60.0  # seconds for a worker's first heartbeat
SILENT_S = 60.0  # seconds without a heartbeat after which a worker counts as dead
REASON = 300  # characters of an error's text
OWN_CLUSTER = "local"  # Ray's name for a cluster that it starts
WORK, HEARTBEAT = "work", "heartbeat"  # each has a thread of its own in a worker


class RayClusterWorker(StoreWorker):
    """A worker that also answers while it computes."""

    def heartbeat(self) -> None:
        """Answer."""


class RayCall:
    """A call to a worker that is under way."""

    def __init__(self, worker: RayWorkerHandle, reference: Any) -> None:
        self._worker, self._reference = worker, reference

    def result(self) -> Any:
        """Wait for the result as long as the worker gives signs of life.

        Raises:
            WorkerLost: The worker died.
            ClusterUnusable: The method raised an error, or the cluster is gone.
            NotFinite, Damaged, LedgerBusy: Of the method, as they are.
        """
        try:
            while not ray.wait([self._reference], timeout=CHECK_S)[0]:
                self._worker.check_heartbeat()
            return ray.get(self._reference)
        except RayTaskError as error:
            if isinstance(error.cause, PASSED_ON):
                raise error.cause from None
            raise ClusterUnusable(f"a worker failed: {error.cause!r}") from error
        except RayError as error:
            raise WorkerLost(_reason(error)) from error
        except Exception as error:
            raise _unusable(error) from error


class RayWorkerHandle:
    """A worker as the server sees it. `call` and `end` may raise ClusterUnusable."""

    def __init__(self, threads: int) -> None:
        try:
            self._actor = _remote(threads).remote(threads)
        except Exception as error:
            raise _unusable(error) from error
        self._heartbeat: Any = None
        self._asked_at, self._patience_s = 0.0, START_S

    def call(self, method: str, *arguments: Any) -> RayCall:
        """Call a method of its ClusterWorker."""
        try:
            return RayCall(self, getattr(self._actor, method).remote(*arguments))
        except Exception as error:
            raise _unusable(error) from error

    def check_heartbeat(self) -> None:
        """Raise WorkerLost if the worker has not answered a heartbeat for SILENT_S."""
        if self._heartbeat is not None and ray.wait([self._heartbeat], timeout=0)[0]:
            self._heartbeat, self._patience_s = None, SILENT_S
        if self._heartbeat is None:
            self._heartbeat, self._asked_at = self._actor.heartbeat.remote(), monotonic()
        elif monotonic() - self._asked_at > self._patience_s:
            raise WorkerLost(f"no sign of life for {self._patience_s:.0f} s")

    def end(self) -> None:
        """End the worker, which may also just be unreachable."""
        try:
            ray.kill(self._actor)
        except Exception as error:
            raise _unusable(error) from error


class RayCluster:
    """A place that runs workers. `start_worker` and `share` may raise ClusterUnusable.

    Args:
        address: ray://HOST:PORT; if it is empty, the cluster that RAY_ADDRESS names, else a new one of this machine.
        threads: Threads of each worker.
        workers: How many; 0 takes as many as the cluster has processors for.

    Raises:
        SettingError: No cluster can be used there.
    """

    def __init__(self, address: str, threads: int, workers: int) -> None:
        self._threads = threads
        warnings.filterwarnings("ignore", message="More than .* of messages have been created", module="ray")
        if ray.is_initialized():
            raise SettingError("--lab: this program uses a Ray cluster already; start the server by itself")
        try:
            where = address or os.environ.get("RAY_ADDRESS", OWN_CLUSTER)
            limits = {"num_cpus": workers * threads or None, "include_dashboard": False} if where == OWN_CLUSTER else {}
            ray.init(where, log_to_driver=False, logging_level="ERROR", **limits)
        except Exception as error:
            ray.shutdown()
            raise SettingError(
                f"--lab: no Ray cluster could be used at {address or 'this machine'} ({_reason(error)}). Look at it with "
                "`ray status` there; it needs the same versions of Python and Ray, and its port for clients (10001)"
            ) from error
        self.size = workers or max(1, int(ray.cluster_resources().get("CPU", 1)) // threads)

    def start_worker(self) -> RayWorkerHandle:
        """Start one more worker."""
        return RayWorkerHandle(self._threads)

    def share(self, value: Any) -> Any:
        """Return something that stands for `value` in the arguments of several calls, so that it is sent once."""
        try:
            return ray.put(value)
        except Exception as error:
            raise _unusable(error) from error

    def close(self) -> None:
        """Let all workers go. Never raises."""
        ray.shutdown()


def connect(location: RayLab, threads: int) -> WorkerPool:
    """Return a pool over the cluster of `location`, each worker with so many threads. Raises SettingError."""
    return WorkerPool(RayCluster(location.address, threads, location.workers))


def _remote(threads: int) -> Any:
    groups = {name: HEARTBEAT if name == "heartbeat" else WORK for name in dir(RayClusterWorker) if not name.startswith("_")}
    methods = {name: ray.method(concurrency_group=group)(getattr(RayClusterWorker, name)) for name, group in groups.items()}
    actor = type("RayClusterWorker", (RayClusterWorker,), methods)
    return ray.remote(num_cpus=threads, max_restarts=0, concurrency_groups={WORK: 1, HEARTBEAT: 1})(actor)


def _unusable(error: Exception) -> Exception:
    """Return the error for one that Ray raises outside of a result: the cluster is not there any more."""
    return error if isinstance(error, (WorkerLost, ClusterUnusable)) else ClusterUnusable(_reason(error))


def _reason(error: Exception) -> str:
    """Return the error's text in one line, cut: some of Ray's texts fill pages."""
    return " ".join(str(error).split())[:REASON] or type(error).__name__
