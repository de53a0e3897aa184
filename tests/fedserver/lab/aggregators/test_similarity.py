"""HeurFedAMP and FedAMP by hand, against an independent float64 oracle, and in their limits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AmpSettings, HeurAmpSettings
from attune.fedserver.lab.aggregators.attention import Amp, HeurAmp, median_distance
from attune.fedserver.lab.aggregators.base import MemoryVault


def mixed(aggregator_of, settings_of, rows: torch.Tensor, samples: list[int] | None = None) -> torch.Tensor:
    """Return the rows that clients c000, c001, ... are served after a round.

    A row is cut into two components, one of which has two tensors.
    """
    vault = MemoryVault()
    D = rows.shape[1]
    cuts = {"a": slice(0, D // 3), "b": slice(D // 3, D // 2), "c": slice(D // 2, D)}
    aggregator = aggregator_of(settings_of, vault, 0, {"one": ["a", "b"], "two": ["c"]})
    aggregator.start({name: torch.zeros_like(rows[0, cut]) for name, cut in cuts.items()})
    weights = samples or [1] * len(rows)
    aggregator.close_round(
        [
            PartUpdate(f"c{i:03}", m, {name: row[cut] for name, cut in cuts.items()})
            for i, (row, m) in enumerate(zip(rows, weights, strict=True))
        ]
    )
    return torch.stack([torch.cat([vault.read(aggregator.slot(f"c{i:03}"))[name] for name in cuts]) for i in range(len(rows))])


def heuristic_oracle(rows: list[list[float]], sigma: float, own: float) -> list[list[float]]:
    result = []
    for i, x in enumerate(rows):
        scores = {}
        for k, y in enumerate(rows):
            norms = math.hypot(*x) * math.hypot(*y)
            scores[k] = sigma * (math.fsum(a * b for a, b in zip(x, y, strict=True)) / norms if norms else 0.0)
        del scores[i]
        powers = {k: math.exp(score - max(scores.values())) for k, score in scores.items()}
        total = math.fsum(powers.values())
        weight = {k: (1 - own) * power / total for k, power in powers.items()} | {i: own if powers else 1.0}
        result.append([math.fsum(weight[k] * y[d] for k, y in enumerate(rows)) for d in range(len(x))])
    return result


def amp_oracle(rows: list[list[float]], sigma: float, step: float) -> list[list[float]]:
    """Compute one gradient step of the paper's regulariser: w_i = x_i - alpha sum_k A'(||x_i - x_k||^2) (x_i - x_k).

    Here A(s) = 1 - e^(-s / sigma) and alpha = step * sigma / S.
    """
    alpha = step * sigma / len(rows)
    result = []
    for x in rows:
        slope = [math.exp(-(math.dist(x, y) ** 2) / sigma) / sigma for y in rows]
        result.append(
            [x[d] - alpha * math.fsum(s * (x[d] - y[d]) for s, y in zip(slope, rows, strict=True)) for d in range(len(x))]
        )
    return result


matrices = st.tuples(st.integers(1, 7), st.integers(4, 30), st.integers(0, 2**31), st.floats(0, 1))


def rows_of(S: int, D: int, seed: int, alike: float) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return alike * torch.randn(1, D, generator=draw) + (1 - alike) * torch.randn(S, D, generator=draw)


def close(found: torch.Tensor, expected: list[list[float]], rows: torch.Tensor) -> bool:
    return float((found.double() - torch.tensor(expected, dtype=torch.float64)).abs().max()) <= 1e-6 * float(rows.abs().max())


@settings(max_examples=50, deadline=None)
@given(matrices, st.floats(0, 1000), st.floats(0, 1))
def test_heuristic_equals_the_oracle(shape, sigma, own):
    rows = rows_of(*shape)
    found = mixed(HeurAmp, HeurAmpSettings(sigma=sigma, self_weight=own), rows)
    assert close(found, heuristic_oracle(rows.tolist(), sigma, own), rows)


@settings(max_examples=50, deadline=None)
@given(matrices, st.floats(0.1, 1000), st.floats(0, 1))
def test_amp_equals_the_oracle(shape, sigma, step):
    rows = rows_of(*shape)
    found = mixed(Amp, AmpSettings(sigma=sigma, step=step), rows)
    assert close(found, amp_oracle(rows.tolist(), sigma, step), rows)


def test_heuristic_of_three_clients_by_hand():
    """Test cosines 1/sqrt(2) and 0 of the first row: with sigma = sqrt(2) ln 3 the others weigh 3 : 1, of 1 - 0.2."""
    rows = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0]])
    found = mixed(HeurAmp, HeurAmpSettings(sigma=math.sqrt(2) * math.log(3), self_weight=0.2), rows)
    assert torch.allclose(found[0], torch.tensor([0.2 + 0.6, 0.6, 0.0, 1.0]))


def test_amp_on_the_scale_of_the_median_by_hand():
    """Test points 0, 1, 3: squared distances 1, 4, 9, so sigma = 4; the first moves by (e^-1/4 * 1 + e^-9/4 * 3) / 3."""
    rows = torch.zeros(3, 4)
    rows[:, 3] = torch.tensor([0.0, 1.0, 3.0])
    found = mixed(Amp, AmpSettings(sigma="auto"), rows)
    assert found[0, 3].item() == pytest.approx((math.exp(-1 / 4) + 3 * math.exp(-9 / 4)) / 3, rel=1e-6)


def test_limits():
    rows = rows_of(5, 12, 3, 0.2)
    mean = rows.mean(dim=0).expand_as(rows)
    assert torch.allclose(mixed(Amp, AmpSettings(sigma=1e9), rows), mean, atol=1e-5)
    assert torch.allclose(mixed(Amp, AmpSettings(sigma=1e-6), rows), rows, atol=1e-6)
    assert torch.equal(mixed(Amp, AmpSettings(step=0.0), rows), rows)
    assert torch.allclose(mixed(HeurAmp, HeurAmpSettings(self_weight=1.0), rows), rows, atol=1e-6)
    assert torch.allclose(mixed(HeurAmp, HeurAmpSettings(sigma=0.0, self_weight=0.2), rows), mean, atol=1e-6)


def test_clients_that_coincide_stay_where_they_are():
    rows = torch.ones(3, 6)
    assert torch.allclose(mixed(Amp, AmpSettings(), rows), rows)
    assert torch.allclose(mixed(HeurAmp, HeurAmpSettings(), rows), rows)


def test_median_of_pairs():
    square = torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 4.0], [9.0, 4.0, 0.0]], dtype=torch.float64)
    assert median_distance(square) == 4.0
    assert median_distance(torch.zeros(1, 1, dtype=torch.float64)) == 0.0


def test_whole_models_have_one_attention():
    """Use a second component whose rows are equal, while those of the first are opposite: alone it would mix differently."""
    vault = MemoryVault()
    aggregator = HeurAmp(HeurAmpSettings(sigma=1.0, self_weight=0.5), vault, 0, {"one": ["a"], "two": ["b"]})
    aggregator.start({"a": torch.zeros(1), "b": torch.zeros(1)})
    metrics = aggregator.close_round(
        [PartUpdate(c, 1, {"a": torch.tensor([a]), "b": torch.tensor([3.0])}) for c, a in (("x", 1.0), ("y", -1.0), ("z", 1.0))]
    )
    share = 0.5 * math.e / (math.e + math.exp(0.8))
    assert vault.read("client/x")["a"].item() == pytest.approx(0.5 + share - (0.5 - share))
    assert metrics == {"self_attention/model": pytest.approx(0.5)}
