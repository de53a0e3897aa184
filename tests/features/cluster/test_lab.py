"""The whole lab over a cluster: served, staged, adapted and resumed state has the bits of the lab of one process."""

import sys

import pytest

from attune.common import aio
from attune.common.errors import SettingError
from attune.features.cluster.server import RayLab
from attune.features.cluster.worker_pool import WorkerPool
from attune.fedserver.executors import Executors
from attune.fedserver.lab.thread import ThreadLab
from attune.fedserver.ports.storage import Storage
from attune.simulation.memory import MemoryStorage
from tests.features.cluster.inline_cluster import InlineCluster
from tests.fedserver.ports.test_lab import METHODS, federation


def run(method: str, cluster: InlineCluster | None, remote: Storage | None = None) -> list[str]:
    executors, storage = Executors(), remote or MemoryStorage()
    try:
        located = None if cluster is None else RayLab("ray")
        if located is not None:
            located.pool = WorkerPool(cluster)
        lab = ThreadLab(storage.blobs, executors, threads=1, cluster=located)
        return aio.run(federation(storage, lab, method))
    finally:
        executors.shutdown()


@pytest.mark.parametrize("dies", [0, 9])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_same_bits_on_workers(method: str, dies: int) -> None:
    cluster = InlineCluster(3)
    cluster.dies = lambda call: bool(dies) and call[1] != "versions" and len(cluster.calls) % dies == 0
    assert run(method, cluster) == run(method, None)
    assert not cluster.closed


@pytest.mark.parametrize("lab", ["ray:", "ray://", "ray://host", "http://host:1", "Ray", "ray://a b:1", "ray://host:port", ""])
def test_a_place_that_is_none_is_refused(lab: str) -> None:
    with pytest.raises(SettingError, match=r"say local, ray \(a Ray cluster of this machine\) or ray://HOST:PORT"):
        RayLab(lab)


def test_without_ray_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"--lab ray needs Ray: pip install 'attune-fl\[ray\]'"):
        RayLab("ray")


def test_workers_are_of_a_cluster_and_have_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="--lab-workers"):
        RayLab("local", 2)
    location = RayLab("ray://host:10001", 4)
    assert (location.address, location.device("auto"), location.device("cpu")) == ("ray://host:10001", "cpu", "cpu")
    assert RayLab("ray").address == "" and RayLab("ray://[::1]:10001").address
    with pytest.raises(SettingError, match=r"server\.device cuda: the workers of --lab ray://host:10001 have no GPU"):
        location.device("cuda")
