"""The workers of a cluster: calls go to the least busy one, and a worker that dies is replaced and its call repeated."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from attune.common.errors import LedgerBusy, SettingError
from attune.features.cluster.workers import WorkerVersions
from attune.fedserver.lab.vault import NotFinite
from attune.fedserver.ports.blobs import Damaged

if TYPE_CHECKING:
    from attune.features.cluster.ray_cluster import RayCluster, RayWorkerHandle

LOG = logging.getLogger("fedserver")
MAX_DEATHS = 3  # workers that die in a row during the same call, before the call counts as the cause
REPLACED = "a worker of the lab is replaced, and its step done again: %s"
NOTICE = (
    "the cluster of --lab is not used any more (%s). This server goes on by itself, with the same results; nothing is lost. "
    "To use a cluster again, start the server again"
)


PASSED_ON = (NotFinite, Damaged, LedgerBusy)  # errors of the work, which would be the same in the server


class WorkerLost(Exception):
    """A worker ended or became unreachable before it answered. The text says how."""


class ClusterUnusable(Exception):
    """No worker can do the work: the cluster is gone, or the work fails on every worker. The text says why."""


class _PoolMember:
    """A place in the pool. Its worker changes when one dies."""

    def __init__(self, worker: RayWorkerHandle) -> None:
        self.worker, self.pending_calls = worker, 0


class PoolCall:
    """A call that is made again, perhaps by another worker, if its worker dies."""

    def __init__(self, pool: WorkerPool, method: str, arguments: tuple[Any, ...]) -> None:
        self._pool, self._method, self._arguments = pool, method, arguments
        self._start()

    def _start(self) -> None:
        self._member = self._pool.least_busy()
        self._worker = self._member.worker
        self._call = self._worker.call(self._method, *self._arguments)
        self._member.pending_calls += 1

    def result(self) -> Any:
        """Wait for the result. Raises ClusterUnusable if the call kills every worker."""
        for attempt in range(MAX_DEATHS):
            if attempt:
                self._start()
            try:
                return self._call.result()
            except WorkerLost as lost:
                LOG.warning(REPLACED, lost)
                self._pool.replace(self._member, self._worker)
            finally:
                self._member.pending_calls -= 1
        raise ClusterUnusable(f"{MAX_DEATHS} workers in a row have ended at the same step")


class WorkerPool:
    """All workers of a cluster.

    Raises:
        SettingError: The workers do not begin, or have other versions of packages.
    """

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self.usable = True
        try:
            self.members = [_PoolMember(cluster.start_worker()) for _ in range(cluster.size)]
            for call in [self.call("versions") for _ in self.members]:
                _check_versions(call.result())
        except ClusterUnusable as error:
            cluster.close()
            raise SettingError(f"--lab: the cluster's workers cannot begin: {error}") from error
        except SettingError:
            cluster.close()
            raise

    def call(self, method: str, *arguments: Any) -> PoolCall:
        """Call a method of the least busy worker. May raise ClusterUnusable."""
        return PoolCall(self, method, arguments)

    def share(self, value: Any) -> Any:
        """Share a value with all workers, as `Cluster.share`. It may raise ClusterUnusable."""
        return self._cluster.share(value)

    def least_busy(self) -> _PoolMember:
        """Return the place with the fewest pending calls; of equal ones, the one that got its last call first."""
        member = min(self.members, key=lambda member: member.pending_calls)
        self.members.remove(member)
        self.members.append(member)
        return member

    def replace(self, member: _PoolMember, lost: RayWorkerHandle) -> None:
        """Start a new worker in this place, unless another call did it already. May raise ClusterUnusable."""
        if member.worker is lost:
            lost.end()
            member.worker = self._cluster.start_worker()

    def give_up(self, reason: ClusterUnusable) -> None:
        """Stop using the cluster, and say so in the log."""
        LOG.warning(NOTICE, reason)
        self.close()

    def close(self) -> None:
        if self.usable:
            self.usable = False
            self._cluster.close()


def _check_versions(versions: WorkerVersions) -> None:
    mine = version("attune-fl"), torch.__version__
    if (versions.attune, versions.torch) != mine:
        raise SettingError(
            f"--lab: the cluster has attune-fl {versions.attune} and torch {versions.torch}, this server {mine[0]} and "
            f"{mine[1]}: install the same there, or results would differ"
        )
