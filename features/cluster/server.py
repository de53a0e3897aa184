"""Cluster on which the pieces of rounds are computed, as `--lab` names it. This module imports neither Ray nor torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from attune.common.errors import SettingError

if TYPE_CHECKING:
    from attune.features.cluster.worker_pool import WorkerPool
    from attune.fedserver.lab.build import Maker

ADDRESS = re.compile(r"ray://([^/\s:]+|\[[0-9a-fA-F:]+\]):\d{1,5}")


@dataclass
class RayLab:
    """The values of --lab and --lab-workers, and the cluster. Implements fedserver.ports.lab.LabCluster.

    Attributes:
        lab: "ray" (a cluster that has this machine) or ray://HOST:PORT.
        workers: How many workers; 0 takes as many as the cluster has processors for.

    Raises:
        SettingError: For anything else, or without Ray.
    """

    lab: str
    workers: int = 0
    pool: WorkerPool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.lab == "local":
            raise SettingError("--lab-workers: there are none with --lab local; say where with --lab")
        if self.lab != "ray" and not ADDRESS.fullmatch(self.lab):
            raise SettingError(
                f"--lab {self.lab}: say local, ray (a Ray cluster of this machine) or ray://HOST:PORT (a cluster of yours)"
            )
        if find_spec("ray") is None:
            raise SettingError(f"--lab {self.lab} needs Ray: pip install 'attune-fl[ray]'")

    @property
    def address(self) -> str:
        """Address of a cluster that exists already; empty if there is none."""
        return self.lab if self.lab.startswith("ray://") else ""

    def device(self, name: str) -> str:
        """Return the processor that this server uses where the settings say `name`: the CPU, as that of the workers is.

        Raises:
            SettingError: For a device that the workers do not have.
        """
        if name not in ("auto", "cpu"):
            raise SettingError(f"server.device {name}: the workers of --lab {self.lab} have no GPU; leave one of them out")
        return "cpu"

    def connect(self, threads: int) -> int:
        prepare_ray()
        from attune.features.cluster.ray_cluster import connect

        self.pool = connect(self, threads)
        return len(self.pool.members)

    def maker(self) -> Maker:
        from attune.features.cluster.cluster_carrier import cluster_maker

        assert self.pool is not None  # noqa: S101 (`connect` comes first)
        return cluster_maker(self.pool)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()


def prepare_ray() -> None:
    """Set what Ray reads from the environment, where the operator has not set it. Call it before Ray is imported.

    Ray then reports no statistics, its workers get their share of a busy machine, and it uses this user's token.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default is 15: on a busy machine such a worker never begins
    given = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if given or (Path.home() / ".ray" / "auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # a cluster that asks for no token accepts one
