"""Cold start: a device without a history is served the mean of the clients' values, or weights near their mean."""

import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AttentionSettings, HypernetworkSettings
from attune.fedserver.lab.aggregators.attention import Mcsa
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.described import evenly, fitted
from attune.fedserver.lab.aggregators.hypernetwork import Hypernetwork
from attune.fedserver.lab.aggregators.mixing import moved

HISTORY = st.lists(
    st.dictionaries(st.sampled_from("abcde"), st.lists(st.floats(-4, 4, width=32), min_size=3, max_size=3), min_size=1),
    min_size=1,
    max_size=6,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(HISTORY)
def test_attended_strangers_get_the_mean_of_all_who_have_contributed(history: list[dict[str, list[float]]]) -> None:
    """Compare with the exact mean over the values that the clients would be served next, after any history of cohorts."""
    vault = MemoryVault()
    aggregator = Mcsa(AttentionSettings(sigma=2.0), vault, 0, {"x": ["x"], "n": ["n"]})
    aggregator.start({"x": torch.tensor([9.0, -9.0, 1.0]), "n": torch.tensor(0, dtype=torch.int64)})
    known: set[str] = set()
    for number, rows in enumerate(history):
        batches = torch.tensor(20 * (number + 1))
        aggregator.close_round([PartUpdate(name, 1, {"x": torch.tensor(row), "n": batches}) for name, row in rows.items()])
        known |= rows.keys()
        served = [vault.read(aggregator.slot(name))["x"].tolist() for name in sorted(known)]
        mean = [math.fsum(column) / len(known) for column in zip(*served, strict=True)]
        assert vault.read(aggregator.cold_start())["x"].tolist() == pytest.approx(mean, abs=1e-5)
        assert vault.read(aggregator.cold_start())["x"].dtype == torch.float32
        assert vault.read(aggregator.cold_start())["n"].dtype == torch.int64


def test_a_mean_is_moved_by_hand() -> None:
    """Start from 2 and 4 (mean 3): the first becomes 5, and a third one, 12, comes in: (5 + 4 + 12) / 3 = 7."""
    mean = torch.tensor([3.0])
    assert moved(mean, [torch.tensor([5.0]), torch.tensor([12.0])], [torch.tensor([2.0]), mean], 3).tolist() == [7.0]
    counter = torch.tensor(3)
    result = moved(counter, [torch.tensor(6)], [torch.tensor(2)], 3)  # 3 + 4/3, rounded
    assert (result.item(), result.dtype) == (4, torch.int64)


def network(**options: object) -> tuple[Hypernetwork, MemoryVault]:
    vault = MemoryVault()
    made = Hypernetwork(HypernetworkSettings(embedding_dim=3, hidden=5, layers=2, **options), vault, 1, {"x": ["x"]})
    made.start({"x": torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))})
    return made, vault


def features_by_hand(saved: Mapping[str, torch.Tensor], z: torch.Tensor) -> torch.Tensor:
    hidden = saved["mlp.0.weight"] @ z + saved["mlp.0.bias"]
    return saved["mlp.1.weight"] @ hidden.clamp(min=0) + saved["mlp.1.bias"]


def by_hand(saved: Mapping[str, torch.Tensor], z: torch.Tensor) -> torch.Tensor:
    return (saved["head.x.weight"] @ features_by_hand(saved, z) + saved["head.x.bias"]).view(4, 2)


def fitted_by_hand(saved: Mapping[str, torch.Tensor], z: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return z after 100 steps of Adam (Kingma and Ba 2015, algorithm 1), rate 0.1, on the features' squared distance."""
    m, v = torch.zeros_like(z), torch.zeros_like(z)
    for t in range(1, 101):
        at = z.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((features_by_hand(saved, at) - wanted).square().sum(), at)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        z = z - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return z


@pytest.mark.parametrize("embedding", ["trained", "fixed"])
def test_unknown_devices_get_weights_near_the_mean_of_all_or_those_of_zero(embedding: str) -> None:
    made, vault = network(embedding=embedding)
    made.admit("idle")
    assert torch.allclose(made.cold_start()["x"], by_hand(vault.read("network"), torch.zeros(3).double()), atol=1e-14)
    names = "abcdef"
    for number in range(3):
        draw = torch.Generator().manual_seed(number)
        made.close_round([PartUpdate(n, 1, {"x": torch.randn(4, 2, generator=draw).double()}) for n in names])
    saved = vault.read("network")
    if embedding == "fixed":
        assert torch.allclose(made.cold_start()["x"], by_hand(saved, torch.zeros(3).double()), atol=1e-14)
        return
    known = list(saved["embedding.value"][:6])
    wanted = torch.stack([features_by_hand(saved, z) for z in known]).mean(dim=0)
    mean = torch.stack(known).mean(dim=0)
    fit = fitted_by_hand(saved, mean, wanted)
    assert torch.allclose(made.cold_start()["x"], by_hand(saved, fit), atol=1e-9)
    off_fit, off_mean = (torch.dist(features_by_hand(saved, z), wanted) for z in (fit, mean))
    assert off_fit < off_mean
    made.admit("late")
    assert torch.equal(dict(made.generate(["late"]))["late"]["x"], made.cold_start()["x"])


def test_what_late_devices_begin_with_follows_each_round() -> None:
    """Expect another cold start after each round, and the same one from the state on disk."""
    made, vault = network()
    seen = [made.cold_start()["x"]]
    for number in range(2):
        made.close_round([PartUpdate(n, 1, {"x": torch.full((4, 2), float(number - k)).double()}) for k, n in enumerate("ab")])
        seen.append(made.cold_start()["x"])
        again = Hypernetwork(made._settings, vault, 1, {"x": ["x"]})
        assert torch.equal(again.cold_start()["x"], seen[-1])
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])


def test_a_fit_that_would_be_worse_than_its_start_is_not_taken() -> None:
    """Start at the best place of a function with a steep wall beside it: every step of Adam would only lead away."""
    start = torch.tensor([0.01]).double()
    found = fitted(lambda z_SE: 1e6 * z_SE.abs(), start, torch.tensor([0.0]).double())
    assert found.abs() <= start.abs()


def test_at_most_a_thousand_embeddings_are_used_evenly_chosen() -> None:
    assert evenly([]) == [] and evenly(["a", "b"]) == ["a", "b"]
    many = [f"{n:05}" for n in range(2_500)]
    assert evenly(many) == many[::3]
