"""Noise of client-level privacy: its statistics, what it is a function of, and how far one device moves a release."""

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from attune.common.exchange.transform import Cohort, PartUpdate, RoundContext
from attune.common.plan import Plan, Profile
from attune.common.privacy.noise import NoiseStream
from attune.common.wire.files import TensorFile, write_tensors
from attune.common.wire.tensors import manifest_of
from attune.fedserver.core.planning import make_plan, resolve
from attune.fedserver.core.records import AcceptedUpdate, Report
from attune.fedserver.lab.client_noise import CLIP_RATE, ClientNoise, _Values, noise_key, noises_of, nonce_of, secret_of
from attune.fedserver.lab.engine import Engine
from attune.fedserver.lab.recovery import take_up
from attune.fedserver.ports.blobs import NOISE_SECRET, Blobs, Damaged, blob_of
from attune.simulation.memory import MemoryStorage

SECRET = bytes(range(32))
CLIP, DEVICES, DRAWN = 0.5, 20, 5
PROFILE = Profile("tabular", (12,), [0, 1, 2], 30, 10)
COUNT = 200_000
Update = Mapping[str, torch.Tensor]


def drawn(secret: bytes = SECRET, run: str = "", part: str = "shared", number: int = 1, attempt: int = 0, *digests: str) -> Any:
    return NoiseStream(noise_key(secret, run, part), nonce_of(number, attempt, digests or ("a", "b"))).normal(COUNT).numpy()


def test_the_noise_of_different_releases_is_independent_and_of_the_same_one_equal() -> None:
    releases = [
        drawn(),
        drawn(bytes(32)),
        drawn(run="second"),
        drawn(part="attended"),
        drawn(number=2),
        drawn(attempt=1),
        drawn(SECRET, "", "shared", 1, 0, "a"),
        drawn(SECRET, "", "shared", 1, 0, "a", "c"),
        drawn(SECRET, "", "shared", 1, 0, "ab"),
    ]
    for one, other in itertools.combinations(releases, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(COUNT)
    assert np.array_equal(releases[0], drawn(SECRET, "", "shared", 1, 0, "b", "a"))
    assert nonce_of(11, 1, ["x"]) != nonce_of(1, 11, ["x"])


def test_the_secret_is_made_once_and_a_damaged_one_is_not_used() -> None:
    blobs = MemoryStorage().blobs
    secret = secret_of(blobs)
    assert len(secret) == 32 and secret_of(blobs) == secret != secret_of(MemoryStorage().blobs)
    blobs.put(NOISE_SECRET, secret[:-1])
    with pytest.raises(Damaged, match=r"noise-secret has 31 bytes"):
        secret_of(blobs)


class Lab:
    """A whole engine with client-level privacy, whose updates come in as in a round."""

    def __init__(self, noise: float, method: Mapping[str, Any], **more: Any) -> None:
        privacy = {"unit": "client", "noise": noise, "clip": CLIP, "devices": DEVICES, **more}
        settings = {"method": dict(method), "model": {"name": "dnn", "hidden": [64]}, "privacy": privacy}
        given = {**settings, "round": {"clients": DRAWN}, "data": {"classes": [0, 1, 2]}}
        self.plan: Plan = make_plan(resolve(given), {"a": PROFILE}, "f")
        self.blobs: Blobs = MemoryStorage().blobs
        self.engine = Engine(self.plan, [], self.blobs, 0)
        self.slots, self.closed = {(slot.part, slot.key): slot for slot in self.engine.staged_slots()}, 0
        self.engine.settle()

    @property
    def value(self) -> dict[str, torch.Tensor]:
        return dict(TensorFile(self.blobs.open(blob_of(self.slots["shared", "value"]))))

    def update(self, name: str, tensors: Update, samples: int = 30) -> AcceptedUpdate:
        blob = write_tensors(partial(self.blobs.create, f"uploads/{name}"), dict(tensors))
        arrived = self.engine.arrive(name, "shared", blob)
        report = Report(round=self.closed + 1, work="train", client=name, samples=samples)
        return AcceptedUpdate(report, {"shared": arrived.blob}, {"shared": arrived.facts})

    def released(self, entries: Mapping[str, AcceptedUpdate]) -> dict[str, torch.Tensor]:
        """Return the next shared value, which is staged and not committed."""
        outcome = self.engine.aggregate(entries)
        assert not outcome.refused and not outcome.bounded
        self.staged = {(slot.part, slot.key): slot for slot in outcome.slots}
        return dict(TensorFile(self.blobs.open(blob_of(self.staged["shared", "value"]))))

    def commit(self) -> None:
        self.engine.settle()
        self.slots, self.closed = self.slots | self.staged, self.closed + 1

    def restart(self) -> list[str]:
        self.engine, remade = take_up(self.plan, list(self.slots.values()), self.blobs, self.closed)
        return remade


def moved(value: Update, by: float, draws: torch.Generator) -> dict[str, torch.Tensor]:
    """Return values with a change of the L2 norm `by`."""
    change = {name: torch.randn(tensor.shape, generator=draws, dtype=torch.float64) for name, tensor in value.items()}
    norm = math.sqrt(sum(float(tensor.square().sum()) for tensor in change.values()))
    return {name: (value[name].double() + change[name] * (by / norm)).float() for name in value}


def distance(one: Update, other: Update) -> float:
    return math.sqrt(sum(float((one[name].double() - other[name].double()).square().sum()) for name in one))


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedbabu", "mr-mtl"])
def test_one_device_moves_a_release_by_no_more_than_the_bound(method: str) -> None:
    lab, draws, chance = Lab(0.0, {"name": method}), torch.Generator().manual_seed(7), np.random.default_rng(7)
    bound, largest = CLIP / DRAWN, 0.0
    for _ in range(50):
        value = lab.value
        cohort = [f"d{number}" for number in range(DEVICES) if chance.random() < DRAWN / DEVICES or number == 0]
        norms, samples = chance.uniform(0.01, 3 * CLIP, len(cohort)), chance.integers(0, 10**6, len(cohort))
        entries = {
            name: lab.update(name, moved(value, norm, draws), int(count))
            for name, norm, count in zip(cohort, norms, samples, strict=True)
        }
        victim = cohort[int(chance.integers(len(cohort)))]
        without = {name: entry for name, entry in entries.items() if name != victim}
        extreme = {name: torch.full_like(tensor, 1e30) for name, tensor in value.items()}
        replaced = {**entries, victim: lab.update("extreme", extreme, 10**9)}
        absent, present = lab.released(without), lab.released(replaced)
        full = lab.released(entries)
        for other in (full, present):
            largest = max(largest, distance(other, absent))
            assert distance(other, absent) <= bound * (1 + 1e-4)
        lab.commit()
        served = lab.engine.serve(["d0", "d1", "stranger"])
        assert len({blob.digest for parts in served.values() for blob in parts.values()}) == 1
        assert [blob.digest for blob in lab.engine.cold_start(["d0"])["d0"].values()] == [served["d0"]["shared"].digest]
    assert largest > bound * 0.99


def noise_in(lab: Lab, entries: Mapping[str, AcceptedUpdate], updates: Mapping[str, Update]) -> np.ndarray:
    """Return the noise of a release, in units of its deviation."""
    value, noisy = lab.value, lab.released(entries)
    factors = {name: min(1.0, CLIP / distance(update, value)) for name, update in updates.items()}
    return np.concatenate(
        [
            (
                (noisy[name].double() - value[name].double()) * DRAWN
                - sum((update[name].double() - value[name].double()) * factors[who] for who, update in updates.items())
            ).numpy().ravel() / CLIP
            for name in sorted(value)
        ]
    )  # fmt: skip


def test_the_same_updates_repeat_the_noise_and_one_fewer_gets_fresh_noise() -> None:
    lab, draws = Lab(1.0, {"name": "fedavg"}), torch.Generator().manual_seed(3)
    updates = {name: moved(lab.value, 2 * CLIP, draws) for name in ("a", "b", "c")}
    entries = {name: lab.update(name, tensors) for name, tensors in updates.items()}
    first = lab.released(entries)
    noise = noise_in(lab, entries, updates)
    assert noise.var() == pytest.approx(1, abs=5 * math.sqrt(2 / noise.size))
    lab.restart()
    again = lab.released(entries)
    assert all(torch.equal(again[name], first[name]) for name in first), "a restart repeats the bits"
    fewer = {name: entries[name] for name in ("a", "b")}
    other = noise_in(lab, fewer, {name: updates[name] for name in fewer})
    assert abs(np.corrcoef(noise, other)[0, 1]) < 5 / math.sqrt(noise.size)
    lab.released(entries)
    lab.commit()
    empty = noise_in(lab, {}, {})
    assert empty.var() == pytest.approx(1, abs=5 * math.sqrt(2 / noise.size)), "an empty cohort releases noise alone"
    assert abs(np.corrcoef(noise, empty)[0, 1]) < 5 / math.sqrt(noise.size)


def test_equal_updates_on_another_value_get_other_noise() -> None:
    """After a restore a device may send the bytes again that it trained from another value."""
    lab, draws = Lab(1.0, {"name": "fedavg"}), torch.Generator().manual_seed(3)
    update, other = moved(lab.value, 0.1, draws), Lab(1.0, {"name": "fedavg"})
    other.blobs.put(NOISE_SECRET, secret_of(lab.blobs))
    for one, first in ((lab, "a"), (other, "b")):
        one.released({first: one.update(first, moved(one.value, 0.1, draws))})
        one.commit()
    noises = [noise_in(one, {"c": one.update("c", update)}, {"c": update}) for one in (lab, other)]
    assert abs(np.corrcoef(*noises)[0, 1]) < 5 / math.sqrt(noises[0].size)


def test_a_damaged_state_is_made_again_with_its_noise() -> None:
    lab, draws = Lab(1.0, {"name": "fedavg"}), torch.Generator().manual_seed(3)
    lab.released({"a": lab.update("a", moved(lab.value, 0.1, draws))})
    lab.commit()
    value, name = lab.value, blob_of(lab.slots["shared", "value"]).name
    lab.blobs.put(name, b"damaged")
    assert lab.restart() == [name]
    assert all(torch.equal(lab.value[key], tensor) for key, tensor in value.items())


def test_parts_share_the_budget() -> None:
    """Several released parts: each has noise for sqrt(B) times its bound."""
    lab = Lab(1.0, {"name": "fedavg"})
    deviations = []
    for blocks in (1, 4):
        noise = ClientNoise(CLIP, 1.0, DRAWN, blocks, partial(noise_key, SECRET, ""))
        before = TensorFile(lab.blobs.open(blob_of(lab.slots["shared", "value"])))
        (one,) = noise.on_cohort(Cohort("shared", ()), RoundContext("shared", 1, lambda _, source=before: source)).updates
        change = torch.cat([(one.tensors[name].double() - before[name].double()).ravel() for name in before.manifest])
        deviations.append(float(change.std()) * DRAWN / CLIP)
    assert deviations == pytest.approx([1.0, 2.0], rel=0.15)


def test_a_change_whose_norm_no_number_can_hold_leaves_the_sum_of_the_others() -> None:
    lab, draws = Lab(0.0, {"name": "fedavg"}), torch.Generator().manual_seed(3)
    before = TensorFile(lab.blobs.open(blob_of(lab.slots["shared", "value"])))
    good = moved(lab.value, 0.1, draws)
    wide = {name: torch.full(tensor.shape, 1e308, dtype=torch.float64) for name, tensor in good.items()}
    released = []
    for tensors in ({"a": good}, {"a": good, "b": {name: -tensor for name, tensor in wide.items()}}):
        updates = tuple(PartUpdate(name, 1.0, _Values(dict(one), manifest_of(one))) for name, one in tensors.items())
        noise = ClientNoise(CLIP, 0.0, DRAWN, 1, partial(noise_key, SECRET, ""))
        context = RoundContext("shared", 1, lambda _: before)
        (one,) = noise.on_cohort(Cohort("shared", updates), context).updates
        released.append({name: one.tensors[name] for name in good})
    assert all(torch.isfinite(tensor).all() for tensor in released[1].values())
    assert distance(*released) <= CLIP / DRAWN * 1.0001


def released_sums(noise: ClientNoise, norms: list[float], rounds: int, seed: int = 0) -> tuple[np.ndarray, list[float]]:
    """Return the noise of each round's sum over q n, and the clipping norm after each round, for changes of these norms."""
    before = _Values({"w": torch.zeros(400, dtype=torch.float64)}, manifest_of({"w": torch.zeros(400, dtype=torch.float64)}))
    updates = []
    for number, norm in enumerate(norms):
        change = {"w": torch.zeros(400, dtype=torch.float64).index_fill_(0, torch.tensor([number]), norm)}
        updates.append(PartUpdate(f"d{number}", 1.0, _Values(change, manifest_of(change))))
    kept, noises, clips = dict[str, float](), [], []
    for number in range(1, rounds + 1):
        context = RoundContext("shared", number, lambda _: before, norms=kept, inputs=(str(seed),))
        clip = kept.get("", CLIP)
        (one,) = noise.on_cohort(Cohort("shared", tuple(updates)), context).updates
        expected = torch.zeros(400, dtype=torch.float64)
        expected[: len(norms)] = torch.tensor([min(norm, clip) for norm in norms], dtype=torch.float64)
        noises.append((one.tensors["w"] - expected / DRAWN).numpy() / clip)
        clips.append(kept.get("", CLIP))
    return np.concatenate(noises), clips


def test_the_clipping_norm_goes_to_the_quantile_by_the_papers_steps() -> None:
    norms = [0.5 + 0.1 * number for number in range(DRAWN)]  # 0.5 ... 0.9
    noise = ClientNoise(0.01, 0.0, DRAWN, 1, partial(noise_key, SECRET, ""), quantile=0.5)
    before = _Values({"w": torch.zeros(9)}, manifest_of({"w": torch.zeros(9)}))
    changes = [{"w": torch.zeros(9).index_fill_(0, torch.tensor([0]), norm)} for norm in norms]
    updates = tuple(PartUpdate(f"d{at}", 1.0, _Values(one, manifest_of(one))) for at, one in enumerate(changes))
    kept, clip = dict[str, float](), 0.01
    for number in range(1, 120):
        context = RoundContext("shared", number, lambda _: before, norms=kept)
        (one,) = noise.on_cohort(Cohort("shared", updates), context).updates
        held = [float(change["w"].norm()) for change in changes]
        assert float(one.tensors["w"][0]) == pytest.approx(sum(min(norm, clip) for norm in held) / DRAWN, rel=1e-6)
        clip *= math.exp(-CLIP_RATE * (sum(norm <= clip for norm in held) / DRAWN - 0.5))
        assert kept[""] == pytest.approx(clip, rel=1e-12)
    assert 0.6 < clip < 0.8


@pytest.mark.parametrize(("sigma", "blocks"), [(1.0, 1), (0.1, 1), (3.0, 4)])
def test_sum_and_count_cost_together_what_is_accounted_for(sigma: float, blocks: int) -> None:
    divided = noises_of(sigma, blocks, 50, counts=True)
    multiplier = sigma * math.sqrt(blocks)
    assert divided.sum**-2 + (2 * divided.count) ** -2 == pytest.approx(multiplier**-2)
    assert multiplier < divided.sum < 1.2 * multiplier and divided.count >= 2.5
    assert noises_of(sigma, blocks, 50, counts=False).sum == multiplier


def test_sum_and_count_have_the_noise_of_that_division() -> None:
    divided = noises_of(1.0, 1, DRAWN, counts=True)
    noise = ClientNoise(CLIP, 1.0, DRAWN, 1, partial(noise_key, SECRET, ""), quantile=0.5)
    drawn, clips = released_sums(noise, [], rounds=400)
    assert drawn.std() * DRAWN == pytest.approx(divided.sum, rel=0.02)
    steps = np.diff(np.log([CLIP, *clips])) / CLIP_RATE  # an empty cohort: noise alone around a share of 1/2
    assert steps.std() * DRAWN == pytest.approx(divided.count, rel=0.15)
    assert abs(steps.mean()) < 5 * divided.count / DRAWN / 20


def test_a_restart_goes_on_with_the_same_clipping_norm() -> None:
    labs, values = (Lab(1.0, {"name": "fedavg"}, clip_quantile=0.5) for _ in range(2)), []
    for lab, restarts in zip(labs, (False, True), strict=True):
        lab.blobs.put(NOISE_SECRET, SECRET)
        draws = torch.Generator().manual_seed(3)
        for _ in range(3):
            changes = {f"d{device}": moved(lab.value, 3 * CLIP, draws) for device in range(3)}
            lab.released({name: lab.update(name, tensors) for name, tensors in changes.items()})
            lab.commit()
            if restarts:
                lab.restart()
        values.append(lab.value)
        norms = lab.engine._norms["shared"]
        assert list(norms) == [""] and norms[""] != CLIP
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
