"""Executor "ray": a device's learners on the workers of a Ray cluster. Ray is imported when it is asked for."""

from __future__ import annotations

import os

from attune.common.errors import SettingError
from attune.fedclient.work.processes.remote_executor import RemoteExecutor


def ray_workers(size: int | None = None) -> RemoteExecutor:
    """Return an executor of so many workers of a Ray cluster, by default one for each processor.

    The cluster is the one that this program is connected to, the one that RAY_ADDRESS names, or a new one of this machine.

    Raises:
        SettingError: Ray is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise SettingError("the executor 'ray' needs Ray: pip install 'attune-fl[ray]'") from None
    from attune.features.cluster.ray_host import RayHost

    if not ray.is_initialized():
        # By default Ray would join the last cluster of this machine, which may be somebody else's, or long gone.
        ray.init(os.environ.get("RAY_ADDRESS", "local"), include_dashboard=False, log_to_driver=False)
    return RemoteExecutor("ray", RayHost, size or max(1, int(ray.cluster_resources().get("CPU", 1))))
