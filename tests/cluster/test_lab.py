"""The whole lab over a crew: what is served, staged, adapted and taken up again has the bits of the lab of one process."""

from __future__ import annotations

import sys

import pytest

from attune.common import aio
from attune.common.errors import SettingError
from attune.fedserver.executors import Executors
from attune.fedserver.lab.cluster.connect import team_of
from attune.fedserver.lab.cluster.inline import InlineCrew
from attune.fedserver.lab.cluster.place import Place
from attune.fedserver.lab.thread import ThreadLab
from attune.fedserver.stores.memory import MemoryBlobs
from tests.ports.test_lab import METHODS, federation


def run(method: str, crew: InlineCrew | None) -> list[str]:
    executors, blobs = Executors(), MemoryBlobs()
    try:
        lab = ThreadLab(blobs, executors, threads=1)
        lab._team = None if crew is None else team_of(crew)
        return aio.run(federation(blobs, lab, method))
    finally:
        executors.shutdown()


@pytest.mark.parametrize("dies", [0, 9])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_the_same_bits_on_workers(method: str, dies: int) -> None:
    crew = InlineCrew(3)
    crew.dies = lambda call: bool(dies) and call[1] not in ("facts", "hold", "fill") and len(crew.calls) % dies == 0
    assert run(method, crew) == run(method, None)
    assert not crew.closed


@pytest.mark.parametrize("lab", ["ray:", "ray://", "ray://host", "http://host:1", "Ray", "ray://a b:1", "ray://host:port", ""])
def test_a_place_that_is_none_is_refused(lab: str) -> None:
    with pytest.raises(SettingError, match=r"say local, ray \(a Ray cluster of this machine\) or ray://HOST:PORT"):
        Place(lab)


def test_without_ray_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"--lab ray needs Ray: pip install 'attune-fl\[ray\]'"):
        Place("ray")
    assert Place().is_here, "which needs none"


def test_workers_are_of_a_cluster_and_have_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="--lab-workers"):
        Place("local", 2)
    monkeypatch.setattr("attune.fedserver.lab.cluster.place.find_spec", lambda name: object())
    place = Place("ray://host:10001", 4)
    assert (place.address, place.is_here, place.device("auto"), place.device("cpu")) == (
        "ray://host:10001",
        False,
        "cpu",
        "cpu",
    )
    assert Place("ray").address == "" and Place().device("cuda") == "cuda" and Place("ray://[::1]:10001").address
    with pytest.raises(SettingError, match=r"server\.device cuda: the workers of --lab ray://host:10001 have no GPU"):
        place.device("cuda")
