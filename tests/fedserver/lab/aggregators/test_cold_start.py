"""Cold start: a device without a history is served the mean of the clients' values, or weights of the mean embedding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AttentionSettings, HypernetworkSettings
from attune.fedserver.lab.aggregators.attention import Mcsa
from attune.fedserver.lab.aggregators.base import MemoryVault
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


def test_old_clients_get_what_they_got_whoever_joins() -> None:
    def play(newcomer: bool) -> list[float]:
        vault = MemoryVault()
        aggregator = Mcsa(AttentionSettings(), vault, 0, {"x": ["x"]})
        aggregator.start({"x": torch.zeros(2)})
        aggregator.close_round(
            [PartUpdate(name, 1, {"x": torch.tensor(row)}) for name, row in (("a", [1.0, 0.5]), ("b", [0.0, 1.0]))]
        )
        if newcomer:
            aggregator.close_round([PartUpdate("z", 1, {"x": torch.tensor([7.0, 7.0])})])
        return vault.read(aggregator.slot("a"))["x"].tolist() + vault.read(aggregator.slot("b"))["x"].tolist()

    assert play(True) == play(False)


def network(**options: object) -> tuple[Hypernetwork, MemoryVault]:
    vault = MemoryVault()
    made = Hypernetwork(HypernetworkSettings(embedding_dim=3, hidden=5, layers=2, **options), vault, 1, {"x": ["x"]})
    made.start({"x": torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))})
    return made, vault


def by_hand(saved: dict[str, torch.Tensor], z: torch.Tensor) -> torch.Tensor:
    hidden = saved["mlp.0.weight"] @ z + saved["mlp.0.bias"]
    hidden = saved["mlp.1.weight"] @ hidden.clamp(min=0) + saved["mlp.1.bias"]
    return (saved["head.x.weight"] @ hidden + saved["head.x.bias"]).view(4, 2)


@pytest.mark.parametrize("embedding", ["trained", "fixed"])
def test_unknown_devices_get_the_weights_of_the_mean_embedding_or_of_zero(embedding: str) -> None:
    made, vault = network(embedding=embedding)
    made.admit("idle")
    assert torch.allclose(made.cold_start()["x"], by_hand(dict(vault.read("network")), torch.zeros(3).double()), atol=1e-14)
    made.close_round(
        [PartUpdate(name, 1, {"x": torch.full((4, 2), value).double()}) for name, value in (("a", 1.0), ("b", -3.0))]
    )
    saved = dict(vault.read("network"))
    mean = saved["embedding.value"][:2].mean(dim=0) if embedding == "trained" else torch.zeros(3).double()
    assert torch.allclose(made.cold_start()["x"], by_hand(saved, mean), atol=1e-14)
