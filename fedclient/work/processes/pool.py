"""Spreads devices over hosts of learners: each device is placed once, where the least is, and stays there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from typing_extensions import Self

from attune.common.errors import SettingError
from attune.common.plan import Plan
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.options import DeviceOptions

if TYPE_CHECKING:
    from attune.fedclient.work.orders import OrderStore
    from attune.fedclient.work.processes.away import Away
    from attune.fedclient.work.processes.messages import Answer, Request
    from attune.fedclient.work.trainer import Progress


class Host(Protocol):
    """What holds learners elsewhere. life: counts how often it was started; with each life all that it held is gone."""

    life: int

    def ask(self, life: int, request: Request, progress: Progress, cancelled: Callable[[], bool]) -> Answer:
        """Errors: Lost if this life is over; Died if it ends before the answer: then the next one has begun."""

    def drop(self, name: str) -> None:
        """The learner of this device may go. Waits for nothing."""

    def close(self) -> None: ...


class Pool:
    """Hosts, each with a thread that waits for it, and which of them has which device."""

    def __init__(self, name: str, start: Callable[[], Host], size: int) -> None:
        self.name = name
        self.hosts: Sequence[Host] = [start() for _ in range(size)]
        self.threads = [ThreadPoolExecutor(1, thread_name_prefix=f"{name}-{number}") for number in range(size)]
        self._samples = [0] * size
        self._seat_of: dict[str, Seat] = {}
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"<Pool {self.name!r} of {len(self.hosts)}, {len(self._seat_of)} devices>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for host in self.hosts:
            host.close()
        for thread in self.threads:
            thread.shutdown(wait=True, cancel_futures=True)

    def make_learner(
        self, plan: Plan, shard: LazyShard, name: str, orders: Callable[[str], OrderStore], options: DeviceOptions
    ) -> Away:
        """As fedclient.work.learner.make_learner, but elsewhere."""
        from attune.fedclient.work.processes.away import Away
        from attune.fedclient.work.processes.messages import Place

        return Away(self._seat(name, shard.profile.samples), Place(name, plan, shard, orders(name), options))

    def _seat(self, name: str, samples: int) -> Seat:
        with self._lock:
            if name not in self._seat_of:
                at = min(range(len(self.hosts)), key=self._samples.__getitem__)
                self._samples[at] += samples
                self._seat_of[name] = Seat(self.hosts[at], self.threads[at])
            return self._seat_of[name]


@dataclass
class Seat:
    """The host of one device. life: of the host, when the device was placed. deaths: in a row, during this device's work."""

    host: Host
    thread: ThreadPoolExecutor
    life: int = 0
    deaths: int = 0


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes(size: int | None = None) -> Pool:
    """A pool of processes of this machine, as many as it has processors unless said otherwise. Errors: SettingError."""
    from attune.fedclient.work.processes.host import process

    return Pool("processes", process, size or cores())


def ray_workers(size: int | None = None) -> Pool:
    """A pool of workers of a Ray cluster, as many as it has processors unless said otherwise.

    The cluster is the one that this program is connected to, the one that RAY_ADDRESS names, or a new one of this machine.
    Errors: SettingError without Ray.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise SettingError("the executor 'ray' needs Ray: pip install 'attune-fl[ray]'") from None
    from attune.fedclient.work.processes.ray_host import RayHost

    if not ray.is_initialized():
        # Of itself Ray would join the last cluster of this machine, which may be somebody else's, or long gone.
        ray.init(os.environ.get("RAY_ADDRESS", "local"), include_dashboard=False, log_to_driver=False)
    return Pool("ray", RayHost, size or max(1, int(ray.cluster_resources().get("CPU", 1))))


# What spreads devices over other processes, by the name of the executor; called with how many there are to be.
POOLS: Mapping[str, Callable[..., Pool]] = {"processes": processes, "ray": ray_workers}
