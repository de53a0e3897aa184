"""Variants of a model on the server: each part has a state for each variant, and the closed form is over all devices."""

import msgspec
import numpy as np
import pytest
import torch

from attune.common.errors import SettingError, WireError
from attune.common.methods.ridge import FEWEST, GRAM
from attune.fedserver.core.records import AcceptedUpdate, Report
from attune.fedserver.lab.recovery import take_up
from attune.fedserver.stores.folder import FolderBlobs
from tests.fedserver.bench import Bench, plan

OF = {"a": "", "b": "", "c": "small", "d": "small"}
SMALL = {"width": 4, "heads": 1, "depth": 2}


class Varied(Bench):
    """Bench whose plan has variants. `of` is the variant of each client."""

    of = OF

    def restart(self):
        self.blobs, slots = FolderBlobs(self.folder), list(self.slots.values())
        self.engine, self.remade = take_up(self.plan, slots, self.blobs, self.closed, variants=self.of)

    def update(self, name, values, samples):
        """Return an update with these numbers, by part, in the shape of the client's variant."""
        parts = {}
        for part, value in values.items():
            manifest = self.engine.groups.of(name, part).manifest
            tensors = {key: torch.full(spec.shape, float(value)) for key, spec in manifest.items()}
            parts[part] = self.write(f"inbox/{name}.{part}.{self.closed}", tensors)
        return AcceptedUpdate(Report(round=self.closed + 1, work="train", client=name, samples=samples), parts)

    def entry(self, name, value, samples):
        return self.update(name, dict.fromkeys(self.engine.manifests, value), samples)

    def own(self, name):
        """Return all that a client is served."""
        return {key: t for part, blob in self.engine.serve([name])[name].items() for key, t in self.read(blob).items()}


def varied(method, model="vit", **variants):
    base = plan(method, model)
    return msgspec.structs.replace(
        base, variants={name: msgspec.structs.replace(base.model, **changes) for name, changes in variants.items()}
    )


@pytest.fixture
def bench(tmp_path):
    return lambda method="fedavg", **options: Varied(tmp_path, varied(method, small={"options": SMALL}, **options))


def test_each_variant_is_the_mean_of_its_own_devices_in_float64(bench):
    tiny = bench()
    shapes = {name: {key: tensor.shape for key, tensor in tiny.own(name).items()} for name in OF}
    assert shapes["a"] == shapes["b"] != shapes["c"] == shapes["d"]
    rng, sent, entries = np.random.default_rng(0), {}, {}
    for name, samples in zip(OF, (30, 10, 7, 5), strict=True):
        sent[name] = samples, {k: rng.normal(size=tuple(t.shape)).astype("f4") for k, t in tiny.own(name).items()}
        blob = tiny.write(f"inbox/{name}", {key: torch.from_numpy(value) for key, value in sent[name][1].items()})
        entries[name] = AcceptedUpdate(Report(round=1, work="train", client=name, samples=samples), {"shared": blob})
    tiny.take(entries)
    for of in ("ab", "cd"):
        total = sum(sent[name][0] for name in of)
        for key, value in tiny.own(of[0]).items():
            mean = sum(sent[name][0] / total * sent[name][1][key].astype(np.float64) for name in of)
            np.testing.assert_allclose(value.numpy(), mean, rtol=0, atol=1e-6)
        assert tiny.digests(of)[of[0]] == tiny.digests(of)[of[1]]


@pytest.mark.parametrize("method", ["fedavg", "fedtp", "fedmcsa", "fedtp+mcsa"])
def test_devices_of_one_variant_get_the_bits_of_a_plan_with_that_model_alone(tmp_path, method):
    alone = Bench(tmp_path / "alone", msgspec.structs.replace(varied(method, small={"options": SMALL}).of_variant("small")))
    beside = Varied(tmp_path / "beside", varied(method, small={"options": SMALL}, other={"options": {}}))
    beside.of = dict.fromkeys("ab", "small") | {"x": ""}
    for tiny in (alone, beside):
        tiny.restart()
        assert tiny.digests()
        tiny.close(a=(0.25, 3), b=(-0.5, 5))
    assert beside.digests() == alone.digests()
    beside.close(a=(0.5, 3), x=(9.0, 50))  # a device of the plan's own model changes nothing of theirs
    alone.close(a=(0.5, 3))
    assert beside.digests() == alone.digests()
    common = [{part: blob.digest for part, blob in t.engine.cold_start(["a"])["a"].items()} for t in (alone, beside)]
    assert common[0] == common[1]
    of_plan = {(slot.part, slot.key): slot.digest for slot in alone.slots.values()}
    small = {
        (slot.part.removesuffix("@small"), slot.key): slot.digest for slot in beside.slots.values() if "small" in slot.part
    }
    assert small == of_plan


@pytest.mark.parametrize("method", ["fedavg", "fedtp", "fedmcsa"])
def test_a_restart_a_damaged_file_and_a_way_back_give_the_same_bits(bench, method):
    tiny = bench(method)
    tiny.digests(OF)
    tiny.close(a=(0.25, 3), c=(-0.5, 5))
    first = tiny.digests(OF)
    tiny.round(b=(1.0, 3), d=(2.0, 5))  # staged, and lost with the process
    tiny.restart()
    assert tiny.digests(OF) == first
    tiny.close(a=(0.5, 2), b=(1.0, 3), c=(1.5, 4), d=(2.0, 5))
    second = tiny.digests(OF)
    assert all(second[name] != first[name] for name in OF)
    damaged = next(slot.file for slot in tiny.slots.values() if "@small" in slot.part and slot.file.split(".")[-2] == "2")
    path, whole = tiny.damage(damaged)
    tiny.restart()
    assert (tiny.remade, path.read_bytes()) == ([f"state/{damaged}"], whole)
    assert tiny.digests(OF) == second
    tiny.engine.go_back(1)
    tiny.closed += 1
    tiny.commit()
    assert tiny.digests(OF) == first


def test_a_variant_with_one_device_has_its_update_and_one_without_any_stays(tmp_path):
    tiny = Varied(tmp_path, varied("fedavg", small={"options": SMALL}, large={"options": {"depth": 3}}))
    before = {slot.part: slot.digest for slot in tiny.slots.values()}
    assert before.keys() == {"shared", "shared@small", "shared@large"}
    tiny.close(a=(1.0, 30), b=(5.0, 10), c=(3.0, 2))
    assert all(torch.equal(tensor, torch.full_like(tensor, 3.0)) for tensor in tiny.own("c").values())
    assert all(torch.equal(tensor, torch.full_like(tensor, 2.0)) for tensor in tiny.own("a").values())
    after = {slot.part: slot.digest for slot in tiny.slots.values()}
    assert after["shared@large"] == before["shared@large"] and tiny.engine.cold_start(["new"])


def test_an_update_in_the_shape_of_another_variant_is_refused(bench):
    tiny = bench()
    blob = tiny.update("a", {"shared": 0.0}, 1).parts["shared"]
    tiny.engine.arrive("a", "shared", blob)
    with pytest.raises(WireError, match="c's shared update"):
        tiny.engine.arrive("c", "shared", blob)
    assert tiny.engine.max_bytes()["shared"] >= blob.size, "of the largest variant"


def test_the_closed_form_is_over_the_devices_of_all_variants(tmp_path):
    tiny = Varied(tmp_path, msgspec.structs.replace(varied("fedavg", small={"options": SMALL}), closed_form=True))
    entries = {}
    for place, name in enumerate(OF):
        update = tiny.update(name, {"shared": float(place)}, 40)
        sums = {key: torch.zeros(spec.shape, dtype=torch.float64) for key, spec in tiny.engine.manifests["solved"].items()}
        sums[GRAM][-1] = FEWEST + place  # samples
        solved = tiny.write(f"inbox/{name}.solved", sums)
        entries[name] = msgspec.structs.replace(update, parts={**update.parts, "solved": solved})
    tiny.take(entries)
    of_clients = {slot.key for slot in tiny.slots.values() if slot.part == "solved" and slot.key.startswith("sums/")}
    assert of_clients == {f"sums/{name}" for name in OF}
    assert {slot.part for slot in tiny.slots.values()} == {"shared", "shared@small", "solved"}
    assert all(parts.keys() == {"shared", "solved"} for parts in tiny.engine.serve(list(OF)).values())


def test_a_variant_without_one_of_the_methods_parts_is_refused_by_name(tmp_path):
    parts = {"head*": "shared", "*weight": "attended", "*": "shared"}
    base = plan("custom", "mlr", parts=parts)
    large = msgspec.structs.replace(base.model, name="dnn", options={"hidden": [4]})
    with pytest.raises(SettingError, match=r"variant large of the model has the parts .*attended.*, and the model itself has"):
        Varied(tmp_path, msgspec.structs.replace(base, variants={"large": large}))
