"""The chain of transforms: its three hooks, what excludes what, sealed updates, and one pass over what arrives."""

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

import attune
from attune.common.errors import SettingError, UpdateRefused
from attune.common.exchange.encodings import encode
from attune.common.exchange.messages import Hello
from attune.common.exchange.transform import PartUpdate
from attune.common.plan import Plan, Profile
from attune.common.protocol import ENCODINGS, SPOKEN
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.tensors import Tensors
from attune.fedserver.core.planning import ResolvedSettings, make_plan, resolve
from attune.fedserver.core.records import AcceptedUpdate, Report
from attune.fedserver.lab.engine import Engine
from attune.simulation.memory import MemoryBlobs
from attune.simulation.result import SimulationResult
from tests.common.exchange.conftest import UNBOUNDED
from tests.e2e.harness import tabular_shard

PROFILE = Profile("tabular", (3,), [0, 1], 10, 4)
needs_zstd = pytest.mark.skipif("zstd" not in ENCODINGS, reason="needs the extra zstd")


def settings(*transforms: str, method: dict[str, Any] = UNBOUNDED, **sections: Any) -> dict[str, Any]:
    return {"method": method, "model": {"name": "mlr"}, "transforms": {name: {} for name in transforms}, **sections}


def plan_of(resolved: ResolvedSettings) -> Plan:
    return make_plan(resolved, {"a": PROFILE, "b": PROFILE}, "f")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("shards")
    return {name: tabular_shard(folder / name, seed) for seed, name in enumerate(("ann", "bob", "carl"))}


def simulated(shards: dict[str, Path], *transforms: str) -> SimulationResult:
    return attune.simulate(shards, method=UNBOUNDED, model="mlr", rounds=2, settings=settings(*transforms), progress=False)


def test_a_transform_is_called_on_devices_on_arrival_and_on_cohorts(shards: dict[str, Path], toys: ModuleType) -> None:
    """The arrival undoes what the device did, so no bit of the models differs."""
    assert simulated(shards, "scale").digests == simulated(shards).digests
    hooks = [hook for hook, _ in toys.CALLS]
    assert hooks[:3] != hooks[3:6], "each device trains and hands in, one after the other"
    assert sorted(hooks[:7]) == ["arrival"] * 3 + ["cohort"] + ["device"] * 3
    assert toys.CALLS[6] == ("cohort", "ann,bob,carl") and hooks.count("cohort") == 2


def test_a_masked_sum_gives_the_mean_of_updates_that_the_server_cannot_read(shards: dict[str, Path], toys: ModuleType) -> None:
    masked, plain = (simulated(shards, *transforms).model("ann").members for transforms in (["mask"], []))
    assert masked.keys() == plain.keys() and plain
    for kind, member in plain.items():
        for name, tensor in member.tensors.items():
            torch.testing.assert_close(masked[kind].tensors[name], tensor, rtol=1e-4, atol=1e-4)


def test_a_sealed_update_is_refused_by_name_when_it_is_read(toys: ModuleType) -> None:
    file = blob_of({"w": torch.ones(3)})[1]
    sealed = PartUpdate("ann", 1.0, file).sealed("mask")
    assert list(sealed.tensors) == ["w"] and len(sealed.tensors) == 1 and "w" in sealed.tensors
    for read in (lambda: sealed.tensors["w"], lambda: sealed.source):
        with pytest.raises(UpdateRefused, match="the update of ann is sealed by mask"):
            read()
    with pytest.raises(UpdateRefused, match="another cannot open the update of ann, which is sealed by mask"):
        sealed.tensors.opened("another")  # type: ignore[attr-defined]
    assert sealed.tensors.opened("mask") is file  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sections", "other"),
    [
        ({"method": {"name": "fedavg"}}, "change-bound"),
        ({"round": {"encoding": "int8"}}, "int8"),
        ({"round": {"encoding": "bf16"}}, "bf16"),
        ({"server": {"max_update_norm": 1.0}}, "norm-limit"),
    ],
)
def test_transforms_that_exclude_each_other_are_both_named(sections: dict[str, Any], other: str, toys: ModuleType) -> None:
    with pytest.raises(SettingError, match=rf"the transforms mask and {other} cannot be combined \(shared\)"):
        resolve(settings("mask", **sections))


def test_settings_of_transforms_are_checked_by_name(toys: ModuleType) -> None:
    for transforms, answer in (
        ({"scael": {}}, "unknown transform 'scael'.*did you mean 'scale'"),
        ({"scale": {"faktor": 2}}, r"unknown setting transforms\.scale\.faktor.*did you mean 'factor'"),
        ({"scale": {"factor": -1}}, r"setting transforms\.scale\.factor"),
        ({"scale": {"parts": ["attended"]}}, "transforms.scale.parts: this method hands in no part 'attended'"),
    ):
        with pytest.raises(SettingError, match=answer):
            resolve({**settings(), "transforms": transforms})


def test_a_plan_names_its_transforms_and_packages(toys: ModuleType) -> None:
    plan = plan_of(resolve({**settings(), "transforms": {"scale": {"factor": 2.0}}}))
    assert (plan.transforms, plan.device_transforms, plan.plugins) == ({"scale": {"factor": 2.0}}, ["scale"], {"toy": "1.0"})


def test_a_device_without_a_transform_is_refused_by_name_before_round_1(toys: ModuleType) -> None:
    resolved = resolve(settings("scale"))
    with pytest.raises(SettingError, match="kiel does not have the transform scale"):
        resolved.encodings.check_device("kiel", Hello("old", b"{}").encodings)
    resolved.encodings.check_device("kiel", (*SPOKEN, "transform:scale"))


def blob_of(tensors: Tensors, blobs: MemoryBlobs | None = None) -> tuple[Any, TensorFile]:
    blobs = blobs or MemoryBlobs()
    blob = write_tensors(partial(blobs.create, "uploads/update"), tensors)
    return blob, TensorFile(blobs.open(blob))


@pytest.mark.parametrize("encoding", ["", "bf16", "int8", pytest.param("zstd", marks=needs_zstd)])
def test_an_arriving_update_is_read_once_and_its_norm_is_kept(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = MemoryBlobs()
    engine = Engine(plan_of(resolve({"method": {"name": "fedavg"}, "model": {"name": "mlr"}})), [], blobs, 0)
    served = dict(TensorFile(blobs.open(engine.serve(["a"])["a"]["shared"])))
    written = encode({name: tensor + 1.0 for name, tensor in served.items()}, encoding, served).tensors
    blob, _ = blob_of(written, blobs)
    reads, fill = dict[str, int](), TensorFile._fill

    def counted(self: TensorFile, tensor_N: torch.Tensor, name: str, start: int) -> None:
        if self._name.endswith("uploads/update"):
            reads[name] = reads.get(name, 0) + tensor_N.nbytes
        fill(self, tensor_N, name, start)

    monkeypatch.setattr(TensorFile, "_fill", counted)
    arrived = engine.arrive("a", "shared", blob, encoding, served=True, max_norm=1e9)
    assert reads == {name: tensor.nbytes for name, tensor in written.items()}
    count = sum(tensor.numel() for tensor in served.values())
    assert arrived.facts["norm"] == pytest.approx(count**0.5, rel=1e-2)
    reads.clear()
    row = Report(round=1, work="train", client="a", samples=3)
    outcome = engine.aggregate({"a": AcceptedUpdate(row, {"shared": arrived.blob}, {"shared": arrived.facts})})
    assert outcome.slots and all(reads[name] == tensor.nbytes for name, tensor in written.items() if name in reads)


def test_an_entry_of_an_older_version_has_its_norm_taken_when_the_cohort_is_closed() -> None:
    digests = []
    for known in (True, False):
        blobs = MemoryBlobs()
        engine = Engine(plan_of(resolve({"method": {"name": "fedavg"}, "model": {"name": "mlr"}})), [], blobs, 0)
        entries = {}
        for client, value in (("a", 1.0), ("b", 1.5), ("c", 900.0)):
            tensors = {name: torch.full(spec.shape, value) for name, spec in engine.manifests["shared"].items()}
            blob = write_tensors(partial(blobs.create, f"inbox/{client}"), tensors)
            facts = {"shared": engine.arrive(client, "shared", blob).facts}
            row = Report(round=1, work="train", client=client, samples=3)
            entries[client] = AcceptedUpdate(row, {"shared": blob}, facts if known else {})
        text = msgspec.json.encode(entries["a"])
        assert (b"facts" in text) is known and msgspec.json.decode(text, type=AcceptedUpdate) == entries["a"]
        outcome = engine.aggregate(entries)
        assert outcome.bounded.keys() == {"c"}
        digests.append([slot.digest for slot in outcome.slots])
    assert digests[0] == digests[1]
