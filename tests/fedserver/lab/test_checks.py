"""Bound of one update relative to its cohort's others: against a float64 oracle, and bit for bit if no bound applies."""

import math
import random

import msgspec
import numpy as np
import pytest
import torch

from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.tensors import Cast
from attune.fedserver.core.adaptation import AdaptationSpec
from attune.fedserver.lab import checks
from attune.fedserver.lab.vault import name_of
from tests.fedserver.bench import Bench, plan

UNBOUNDED = {"bound_change": 0.0, "bound_samples": 0.0}


@pytest.fixture
def bench(tmp_path):
    return lambda *what, **options: Bench(tmp_path / f"{len(list(tmp_path.iterdir()))}", plan(*what, **options))


def numbers(tiny, client="a"):
    """Return all served numbers of a client in float64."""
    parts = tiny.engine.serve([client])[client]
    return np.concatenate([t.double().numpy().ravel() for p in sorted(parts) for t in tiny.read(parts[p]).values()])


def flat(tiny, value):
    return np.full(sum(int(np.prod(s.shape)) for s in tiny.engine.manifests["shared"].values()), np.float64(np.float32(value)))


@pytest.mark.parametrize("value", [1e30, -3e38, 50.0, 3.5])
def test_one_extreme_of_four_moves_the_mean_no_further_than_others(bench, value):
    tiny = bench()
    start, said = numbers(tiny), {"ann": (1.0, 10), "bob": (1.5, 30), "carl": (0.5, 20), "eve": (value, 20)}
    rows = {name: flat(tiny, each) - start for name, (each, _) in said.items()}
    median = sorted(np.linalg.norm(row) for row in rows.values())[1]
    for name, row in rows.items():
        norm = np.linalg.norm(row)
        rows[name] = row if norm <= 3 * median else row * max(median, 6 * median - norm) / norm
    expected = start + sum(rows[name] * samples for name, (_, samples) in said.items()) / 80
    tiny.close(**said)
    assert np.allclose(numbers(tiny), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "fedtp", "fedmcsa", "fedamp"])
def test_within_the_bounds_every_bit_is_as_without_them(bench, method):
    found = []
    for options in ({}, UNBOUNDED):
        tiny = bench(method, "vit", **options)
        start = tiny.engine.serve(["a", "b", "c"])
        assert start
        tiny.close(a=(0.5, 20), b=(0.51, 30), c=(0.52, 25))
        found.append((tiny.digests(("a", "b", "c")), {key: slot.digest for key, slot in tiny.slots.items()}))
    assert found[0] == found[1]


@pytest.mark.parametrize("method", ["fedtp", "fedmcsa", "fedamp"])
def test_parts_of_a_device_s_own_are_bounded_too(bench, method):
    """Let Eve hand in 1e30: without a bound it is in the honest devices' values, or in the network that generates them."""
    tiny = bench(method, "vit")
    tiny.engine.serve(["ann", "bob", "carl", "eve"])
    tiny.close(ann=(0.01, 10), bob=(0.02, 10), carl=(0.01, 10), eve=(1e30, 10))
    assert np.abs(numbers(tiny, "ann")).max() < 100
    assert np.abs(numbers(tiny, "stranger")).max() < 100


def test_no_variance_of_a_batch_norm_gets_below_zero(bench):
    """With one number below zero, well within the bounds, one device of ten took 86 points from all others."""
    tiny = bench("fedavg", "convnet-bn")
    tiny.close(ann=(0.01, 10), bob=(0.02, 10), eve=(-0.5, 10))
    served = [tiny.read(blob) for blob in tiny.engine.serve(["ann"])["ann"].values()]
    variances = [tensor for part in served for name, tensor in part.items() if name.endswith("running_var")]
    assert variances and all((tensor >= 0).all() for tensor in variances)
    assert any((tensor < 0).all() for part in served for tensor in part.values())


def test_samples_count_for_at_most_so_many_medians(bench):
    tiny = bench()
    tiny.close(ann=(1.0, 10), bob=(1.0, 10), carl=(1.0, 10), eve=(1.2, 1 << 40))
    assert np.allclose(numbers(tiny), (3 * 1.0 + 5 * 1.2) / 8, rtol=1e-6)


def test_two_updates_have_no_median_that_one_does_not_decide(bench):
    tiny = bench()
    tiny.close(ann=(1.0, 1), bob=(3.0, 999))
    assert np.allclose(numbers(tiny), 2.998, rtol=1e-5)


def test_a_cohort_of_liars_moves_the_state_no_further_than_the_fleet_is_used_to(bench):
    """Three of ten devices are a whole cohort: their own median says nothing, the fleet's does."""
    tiny = bench()
    names = "abcdefg"
    for start in (0, 3, 1):
        at = numbers(tiny).mean()
        tiny.close(**dict.fromkeys(names[start : start + 3], (at + 0.1, 1)))
    for restart in (False, True):
        if restart:
            tiny.restart()
        before = numbers(tiny)
        tiny.close(x=(1e6, 1), y=(1e6, 1), z=(1e6, 1))
        assert np.abs(numbers(tiny) - before).max() < 0.2
    before = numbers(tiny)
    tiny.close(a=(before.mean() + 0.1, 1), x=(1e30, 1), z=(-1e6, 1))
    assert np.abs(numbers(tiny) - before).max() < 0.2


def test_the_first_cohort_and_one_without_a_median_have_a_bound_too(bench):
    for sent in ({"x": 1e6, "y": 1e6, "z": 1e6}, {"x": 1e30, "a": 0.1}, {"x": 1e30}):
        tiny = bench()
        tiny.close(**{name: (value, 1) for name, value in sent.items()})
        assert np.abs(numbers(tiny)).max() <= 31
        assert tiny.engine.go_back(tiny.closed - 1).slots


def test_an_extreme_does_not_pass_where_nobody_else_changes_anything(bench):
    tiny = bench()
    served = numbers(tiny)
    still = {name: tiny.entry(name, 0.0, 1) for name in "ab"}
    for name, entry in still.items():
        values = tiny.read(next(iter(tiny.engine.serve([name])[name].values())))
        still[name] = msgspec.structs.replace(entry, parts={"shared": tiny.write(f"inbox/same.{name}", values)})
    tiny.take({**still, "x": tiny.entry("x", 1e30, 1)})
    assert np.abs(numbers(tiny) - served).max() < 1


STILL_FLEETS = [
    ("fedavg", "mlr", {}),
    ("fedmcsa", "mlr", {}),
    ("pfedhn", "mlr", {}),
    ("fedtp", "vit", {}),
    ("fedtp", "vit", {"server_optimiser": "sgd"}),
    ("fedavg", "mlr", {"shared_optimiser": "adam"}),
    ("fedavg", "mlr", {"shared_optimiser": "adagrad"}),
]


@pytest.mark.parametrize(("method", "model", "options"), STILL_FLEETS)
@pytest.mark.parametrize(
    ("still", "liars", "value", "noise"), [("ab", "x", 1e30, 0.0), ("abc", "xy", -50.0, 0.0), ("abc", "xy", 1e30, 1e-6)]
)
def test_where_nobody_else_moves_a_minority_does_not_get_far(bench, method, model, options, still, liars, value, noise):
    """A bound that is a share of the state's own norm would grow with the state, by a share in every round.

    An optimiser that divides by the size of the changes makes full steps of small ones, and so does a network of layers.
    """
    tiny, draw = bench(method, model, **options), torch.Generator().manual_seed(1)
    tiny.engine.serve([*still, *liars])
    start = np.linalg.norm(numbers(tiny))
    for _ in range(25):
        entries = {name: tiny.entry(name, value, 1) for name in liars}
        for name in still:
            served = tiny.engine.serve([name])[name]
            parts = {}
            for part in tiny.engine.manifests:
                same = unmoved(tiny, part, served[part])
                near = {key: t + noise * torch.randn(t.shape, generator=draw) for key, t in same.items()}
                parts[part] = tiny.write(f"inbox/same.{name}.{part}.{tiny.closed}", near)
            entries[name] = msgspec.structs.replace(tiny.entry(name, 0.0, 1), parts=parts)
        tiny.take(entries)
    assert np.linalg.norm(numbers(tiny)) < 2 * start


def unmoved(tiny, part, blob):
    """Return an update that changes nothing: the served values, or zeros where changes are handed in."""
    if tiny.engine.groups.of("", part).settings.returns == "values":
        return tiny.read(blob)
    return {name: torch.zeros(spec.shape) for name, spec in tiny.engine.manifests[part].items()}


@pytest.mark.parametrize(("devices", "liars", "clients"), [(5, 2, 3), (10, 4, 4)])
@pytest.mark.parametrize("value", [1e30, -50.0])
def test_liars_who_capture_rounds_now_and_then_do_not_keep_the_state(bench, devices, liars, clients, value):
    """The first round, of which there is no history, is all theirs."""
    tiny, draw = bench(), random.Random(devices * liars * clients)
    names = [f"d{number}" for number in range(devices)]
    bad = set(names[:liars])
    cohorts = [names[:clients], *(draw.sample(names, clients) for _ in range(25))]
    for cohort in cohorts:
        tiny.close(**{name: (value if name in bad else 0.5, 1) for name in cohort})
    for _ in range(12):
        tiny.close(**{name: (value if name in bad else 0.5, 1) for name in names[-(2 * liars + 1) :]})
    assert np.abs(numbers(tiny) - 0.5).max() < 1.5


def test_a_fleet_whose_changes_grow_is_followed(bench):
    tiny = bench()
    for step in (0.1, 0.1, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0):
        before = numbers(tiny)
        tiny.close(**{name: (before.mean() + step, 1) for name in "abc"})
    assert np.allclose(numbers(tiny).mean() - before.mean(), 10.0, rtol=0.1)


def test_the_norms_of_a_damaged_round_are_those_it_was_made_with(bench):
    tiny = bench()
    for value in (0.1, 0.2, 0.3):
        tiny.close(a=(value, 1), b=(value, 1), c=(value, 1))
    tiny.close(a=(1e6, 1), b=(1e6, 1), c=(1e6, 1))
    digests = tiny.digests()
    [name] = {slot.file for slot in tiny.slots.values() if slot.part == "shared"}
    path = tiny.folder / "state" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    tiny.restart()
    assert tiny.remade == [f"state/{name}"]
    assert tiny.digests() == digests


@pytest.mark.parametrize("robust", ["median", "trimmed-mean", "multi-krum"])
@pytest.mark.parametrize(("method", "value"), [("fedavg", -200.0), ("fedavg", 1e30), ("fedtp", -200.0), ("fedtp", 1e30)])
def test_an_extreme_has_no_vote(bench, robust, method, value):
    """Exclude the extreme update: made as small as usual, it would hide in the vote. Not a bit of it may be left."""
    values = {"ann": 0.01, "bob": 0.01, "carl": 0.013, "dora": 0.01, "emil": 0.01, "fred": 0.009}
    honest = {name: (value_, 10) for name, value_ in values.items()}
    found = []
    for extreme in (value, 777.0):
        tiny = bench(method, "vit", robust=robust)
        tiny.engine.serve([*honest, "xena", "yves"])
        tiny.close(**honest, xena=(extreme, 10), yves=(extreme, 10))
        found.append(tiny.digests(tuple(honest)))
        [shared] = {float(t.max()) for t in tiny.read(tiny.engine.serve(["ann"])["ann"]["shared"]).values()}
        mean = sum(values.values()) / 6
        assert shared == pytest.approx(0.01 if robust == "median" else mean, rel=1e-5), (
            "two of eight, as many as are reckoned with"
        )
    assert found[0] == found[1]


def test_who_has_no_vote_is_named_and_who_is_only_bounded_is_not_said_to_have_none(bench):
    said = {"ann": 1.0, "bob": 1.1, "carl": 1.2, "eve": 1000.0}
    for robust, without in (("none", []), ("clip", []), ("multi-krum", ["eve"])):
        tiny = bench(robust=robust)
        outcome = tiny.engine.aggregate({name: tiny.entry(name, value, 10) for name, value in said.items()})
        assert outcome.bounded.keys() == {"eve"}, "to be clipped is nothing to tell: half of a cohort is, in every round"
        assert outcome.bounded["eve"] > 300
        assert outcome.without_vote == without


def test_a_newcomer_learns_from_a_change_that_would_have_no_vote(bench):
    """Use a newcomer beside a frozen network: its embedding is its own, so the change is bounded, and there is no vote."""
    tiny = bench("fedtp", "vit", robust="multi-krum")
    tiny.close(ann=(0.01, 10), bob=(0.02, 10), carl=(0.01, 10))
    before = tiny.digests(("dora", "eve"))
    entries = {name: tiny.entry(name, value, 10) for name, value in (("cy", 0.01), ("dora", 0.01), ("eve", 5.0))}
    outcome = tiny.take(entries, adaptation=AdaptationSpec(("generated",), ("generated",), common=False))
    assert outcome.without_vote == []
    after = tiny.digests(("dora", "eve"))
    assert all(after[name]["generated"] != before[name]["generated"] for name in after)


def test_an_update_without_a_vote_moves_the_embedding_of_its_own_device_only(bench):
    honest, served = dict.fromkeys(("ann", "bob", "carl"), (0.01, 10)), []
    for late in ({"zoe": (5.0, 10)}, {}):
        tiny = bench("fedtp", "vit")
        tiny.engine.serve([*honest, "zoe"], founders=[*honest, "zoe"])
        tiny.close(**honest, **late)
        served.append({name: parts["generated"] for name, parts in tiny.digests((*honest, "zoe")).items()})
    with_her, without_her = served
    assert {name for name, digest in with_her.items() if digest != without_her[name]} == {"zoe"}


def test_a_late_device_reaches_the_others_while_it_has_no_vote(bench):
    tiny = bench("fedtp", "vit")
    founders = dict.fromkeys(("ann", "bob", "carl"), (0.01, 10))
    tiny.engine.serve(list(founders), founders=list(founders))
    tiny.close(**founders)
    without_vote = []
    served = [numbers(tiny, "zoe").sum()]
    for _ in range(5):
        entries = {name: tiny.entry(name, *said) for name, said in (founders | {"zoe": (5.0, 10)}).items()}
        without_vote += tiny.take(entries).without_vote
        served.append(numbers(tiny, "zoe").sum())
    assert without_vote == ["zoe"] * 5
    assert served == sorted(served), "each change is a rise of every weight, so each step raises their sum"
    assert served[-1] > served[0]
    before = tiny.digests(("ann", "zoe"))
    tiny.damage(next(slot.file for slot in tiny.slots.values() if slot.key == "network"))
    tiny.restart()
    assert tiny.remade
    assert tiny.digests(("ann", "zoe")) == before


@pytest.mark.parametrize(("medians", "multiple", "norm"), [(3.5, 3, 2.5), (5, 3, 1), (400, 3, 1), (1.5, 1, 1), (9, 0.5, 0.5)])
def test_the_further_above_the_bound_the_less_it_counts_down_to_one_median(medians, multiple, norm):
    assert checks.bounding_factor(medians, multiple) * medians == pytest.approx(norm)


def test_half_of_a_cohort_cannot_raise_the_median():
    assert checks.above_bound({"a": 1.0, "b": 2.0, "x": 1e9, "y": 1e9}, 3.0, 2.0) == {"x": 5e8, "y": 5e8}
    assert checks.above_bound({"a": 0.0, "b": 0.0, "x": 9.0}, 3.0, 0.0) == {}
    assert checks.bounded_weights({"a": 0.0, "b": 3.0, "c": 4.0, "x": 1e15}, 5.0) == {"a": 0.0, "b": 3.0, "c": 4.0, "x": 20.0}


def test_a_state_that_would_not_be_finite_is_not_made_and_the_present_one_stays(bench):
    """Use no bounds. The updates are finite, but the optimiser's squares of them are not."""
    tiny = bench("fedtp", "vit", bound_change=0)
    before = tiny.digests()
    entries = {name: tiny.entry(name, 3e38, 10) for name in ("a", "b")}
    outcome = tiny.take(entries)
    assert "finite" in outcome.refused
    assert outcome.slots == []
    assert tiny.digests() == before
    tiny.restart()
    assert tiny.digests() == before
    tiny.close(a=(0.01, 1), b=(0.02, 1))
    assert tiny.digests() != before


@pytest.mark.parametrize("method", ["fedavg", "fedtp", "fedmcsa"])
@pytest.mark.parametrize("restart", [False, True])
def test_going_back_serves_what_was_served_before_the_last_round(bench, method, restart):
    tiny = bench(method, "vit")
    tiny.digests(("a", "b"))
    tiny.close(a=(0.5, 1), b=(0.6, 1))
    good = tiny.digests(("a", "b"))
    stranger = {part: blob.digest for part, blob in tiny.engine.cold_start(["a"])["a"].items()}
    tiny.close(a=(50.0, 1), b=(60.0, 1), c=(70.0, 1))
    assert tiny.digests(("a", "b")) != good
    if restart:
        tiny.restart()
    assert tiny.engine.go_back(tiny.closed - 1).slots
    tiny.closed += 1
    tiny.commit()
    for _ in range(2):
        assert tiny.digests(("a", "b")) == good
        assert {part: blob.digest for part, blob in tiny.engine.cold_start(["a"])["a"].items()} == stranger
        tiny.restart()
    if method == "fedmcsa":
        assert tiny.digests(("c",))["c"] == stranger, "who had no value of its own then has the common one"
    tiny.close(a=(0.7, 1), b=(0.8, 1))
    tiny.close(a=(0.7, 1), b=(0.9, 1))
    kept = {f"state/{slot.file}" for slot in tiny.slots.values()} | {name_of(tiny.closed)}
    assert kept <= set(tiny.blobs.names("state/"))
    tiny.restart()
    assert tiny.remade == []


@pytest.mark.parametrize("method", ["fedavg", "fedtp", "fedmcsa"])
@pytest.mark.parametrize("restart", [False, True])
def test_a_state_of_some_rounds_ago_is_served_again_in_every_bit(bench, method, restart):
    tiny, served = bench(method, "vit"), []
    served.append(tiny.digests())
    for value in (0.5, 50.0, 60.0, 70.0):
        tiny.close(keep=3, a=(value, 1), b=(value + 1, 1), **({} if value == 0.5 else {"c": (value, 1)}))
        served.append(tiny.digests())
    if restart:
        tiny.restart()
    assert "not known" in tiny.engine.go_back(0).refused
    tiny.go_back(3)
    assert tiny.digests() == served[3]
    tiny.go_back(1)
    if restart:
        tiny.restart()
    assert tiny.digests() == served[1]
    tiny.go_back(4)
    assert tiny.digests() == served[4], "what was taken back is an earlier state too"
    for value in (0.7, 0.8, 0.9):
        tiny.close(keep=1, a=(value, 1), b=(value, 1), c=(value, 1))
    assert len(tiny.blobs.names("state/recipe")) == 1, "blobs of states that are no longer kept are removed"
    assert len(tiny.blobs.names("state/")) <= 1 + 2 * len(tiny.slots)
    tiny.restart()
    assert tiny.remade == []


def test_a_damaged_earlier_state_is_not_gone_back_to(bench):
    tiny = bench()
    for value in (0.1, 0.2, 0.3):
        tiny.close(keep=3, a=(value, 1), b=(value, 1), c=(value, 1))
    path = tiny.folder / "state" / "shared.value.1.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    tiny.restart()
    before = tiny.digests()
    outcome = tiny.engine.go_back(1)
    assert "damaged" in outcome.refused and outcome.slots == []
    tiny.closed += 1
    tiny.commit()
    assert tiny.digests() == before


def test_a_bounded_file_reads_the_same_whole_in_spans_and_in_blocks(bench):
    tiny = bench()
    manifest = tiny.engine.manifests["shared"]
    served = tiny.write("uploads/served", {name: torch.full(spec.shape, 2.0) for name, spec in manifest.items()})
    update = tiny.write(
        "uploads/new", {name: torch.arange(float(np.prod(spec.shape))).view(spec.shape) for name, spec in manifest.items()}
    )
    base = TensorFile(tiny.blobs.open(served))
    with TensorFile(tiny.blobs.open(update)) as file:
        found = checks.BoundedTensors(Cast(file, manifest), base, 0.25)
        for name in found:
            whole = found[name].view(-1)
            oracle = 2 + (np.arange(whole.numel(), dtype=np.float64) - 2) / 4
            assert np.allclose(whole.double().numpy(), oracle, atol=1e-6)
            assert torch.equal(torch.cat([block.clone() for _, block in found.blocks(name, 3)]), whole)
            assert torch.equal(found.span(name, 1, 3), whole[1:3])
            out = torch.empty_like(whole)
            found.read_into(name, out)
            assert torch.equal(out, whole)


def test_the_norm_of_a_change_is_summed_in_float64(tmp_path):
    """Add up squares of which float32 loses the small one, and of which float16 has none of the large one."""
    write_tensors(tmp_path / "x", {"a": torch.tensor([1e4, 1.0]), "b": torch.tensor([[600.0]], dtype=torch.float16)})
    with TensorFile(tmp_path / "x") as file:
        assert checks.change_norm(file, None) == math.sqrt(1e8 + 1 + 360_000)
