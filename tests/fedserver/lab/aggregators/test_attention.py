"""FedMCSA against an independently written float64 oracle, its two limits, and the state that is kept."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attune.common.errors import SettingError
from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AttentionSettings
from attune.fedserver.lab.aggregators.attention import Mcsa, attention, cosines
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.votes import gram


def oracle(
    rows: list[list[float]], sigma: float, samples: list[float] | None = None
) -> tuple[list[list[float]], list[list[float]]]:
    """Compute FedMCSA with errata E1: A[i][k] = m_k e^(sigma cos(i,k)) / sum_h m_h e^(sigma cos(i,h)), W = A X."""

    def cosine(x: list[float], y: list[float]) -> float:
        norms = math.sqrt(math.fsum(a * a for a in x)) * math.sqrt(math.fsum(b * b for b in y))
        return math.fsum(a * b for a, b in zip(x, y, strict=True)) / norms if norms else 0.0

    weight = samples or [1.0] * len(rows)
    A, W = [], []
    for x in rows:
        scores = [sigma * cosine(x, y) for y in rows]
        powers = [m * math.exp(score - max(scores)) for m, score in zip(weight, scores, strict=True)]
        A.append([power / math.fsum(powers) for power in powers])
        W.append([math.fsum(a * y[d] for a, y in zip(A[-1], rows, strict=True)) for d in range(len(x))])
    return A, W


def mixed(X_SD: torch.Tensor, sigma: float, samples: list[int] | None = None, weighting: str = "none") -> torch.Tensor:
    """Return the rows that the aggregator serves to c000, c001, ... after a round with these rows."""
    vault = MemoryVault()
    aggregator = Mcsa(AttentionSettings(sigma=sigma, weighting=weighting), vault, 0, {"x": ["x"]})
    aggregator.start({"x": torch.zeros_like(X_SD[0])})
    weights = samples or [1] * len(X_SD)
    aggregator.close_round([PartUpdate(f"c{i:03}", m, {"x": x}) for i, (x, m) in enumerate(zip(X_SD, weights, strict=True))])
    return torch.stack([vault.read(aggregator.slot(f"c{i:03}"))["x"] for i in range(len(X_SD))])


def close(W_SD: torch.Tensor, expected: torch.Tensor, X_SD: torch.Tensor, tolerance: float = 1e-6) -> bool:
    """Compare relative to the largest number that is mixed, because a mixture may cancel."""
    return float((W_SD.double() - expected.double()).abs().max()) <= tolerance * float(X_SD.abs().max())


matrices = st.tuples(st.integers(1, 8), st.integers(1, 40), st.integers(0, 2**31), st.floats(0, 1))


def rows_of(S: int, D: int, seed: int, alike: float) -> torch.Tensor:
    """Return S rows of float32 that share a direction to the extent `alike`; now and then one of them is zero."""
    generator = torch.Generator().manual_seed(seed)
    X_SD = alike * torch.randn(1, D, generator=generator) + (1 - alike) * torch.randn(S, D, generator=generator)
    if seed % 3 == 0:
        X_SD[seed % S] = 0
    return X_SD


@settings(max_examples=60, deadline=None)
@given(matrices, st.floats(0, 1000), st.booleans())
@example((5, 33, 1, 0.3), 0.0, False)  # the mean
@example((3, 8, 1, 0.3), 0.0, True)  # the mean weighted by samples
def test_equals_the_oracle(shape, sigma, by_samples):
    X_SD = rows_of(*shape)
    samples = [1 + 7 * i for i in range(len(X_SD))] if by_samples else None
    A, W = oracle(X_SD.tolist(), sigma, samples)
    W_SD = mixed(X_SD, sigma, samples, "samples" if by_samples else "none")
    assert close(W_SD, torch.tensor(W, dtype=torch.float64), X_SD)
    shares_S = torch.tensor(samples, dtype=torch.float64) / sum(samples) if samples else None
    A_SS = attention(cosines(gram(X_SD)), sigma, shares_S)
    assert torch.allclose(A_SS, torch.tensor(A, dtype=torch.float64), rtol=0, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(matrices, st.floats(0, 1e9), st.booleans())
def test_rows_sum_to_one(shape, sigma, by_samples):
    """Errata E1: the paper's equation 7 normalises over the wrong index."""
    X_SD = rows_of(*shape)
    shares_S = torch.full((len(X_SD),), 1 / len(X_SD), dtype=torch.float64) if by_samples else None
    A_SS = attention(cosines(gram(X_SD)), sigma, shares_S)
    assert torch.allclose(A_SS.sum(dim=1), torch.ones(len(X_SD), dtype=torch.float64), atol=1e-12)
    assert (A_SS >= 0).all()


def test_by_hand():
    """Test x = (1,0), (0,1): cosines 1 and 0; with sigma = ln 3 the weights are 3/4 and 1/4."""
    assert torch.allclose(mixed(torch.eye(2), math.log(3)), torch.tensor([[0.75, 0.25], [0.25, 0.75]]))


def served(X: dict[str, list[list[float]]], **options) -> dict[str, torch.Tensor]:
    """Return what clients are served of each component, (S, D), after a round with these rows."""
    vault = MemoryVault()
    aggregator = Mcsa(AttentionSettings(**options), vault, 0, {name: [name] for name in X})
    rows = {name: torch.tensor(values, dtype=torch.float64) for name, values in X.items()}
    count = len(next(iter(rows.values())))
    aggregator.start({name: torch.zeros_like(values[0]) for name, values in rows.items()})
    aggregator.close_round([PartUpdate(f"c{i}", 1, {name: values[i] for name, values in rows.items()}) for i in range(count)])
    return {name: torch.stack([vault.read(aggregator.slot(f"c{i}"))[name] for i in range(count)]) for name in rows}


def test_equation_7_as_printed_by_hand():
    """Errata E1: with e^sigma = 2 the denominators of (1,0), (1,0), (0,1) are 5, 5 and 4; they belong to k, not to i."""
    X = {"x": [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]}
    corrected = torch.tensor([[4 / 5, 1 / 5], [4 / 5, 1 / 5], [2 / 4, 2 / 4]], dtype=torch.float64)
    printed = torch.tensor([[4 / 5, 1 / 4], [4 / 5, 1 / 4], [2 / 5, 2 / 4]], dtype=torch.float64)
    assert torch.allclose(served(X, sigma=math.log(2))["x"], corrected)
    assert torch.allclose(served(X, sigma=math.log(2), equation7="printed")["x"], printed)


def test_a_fixed_weight_on_oneself_is_the_same_in_every_component():
    """Client 0 is like client 1 in one component, and like client 2 in the other: the rest of its weight goes there."""
    X = {"a": [[1.0, 0.0], [2.0, 0.0], [0.0, 5.0]], "b": [[1.0, 0.0], [0.0, 5.0], [4.0, 0.0]]}
    found = served(X, sigma=200.0, self_weight=0.4)
    assert torch.allclose(found["a"][0], torch.tensor([0.4 * 1 + 0.6 * 2, 0.0], dtype=torch.float64))
    assert torch.allclose(found["b"][0], torch.tensor([0.4 * 1 + 0.6 * 4, 0.0], dtype=torch.float64))
    alone = served(X, sigma=200.0, self_weight=1.0)
    assert all(torch.allclose(alone[name], torch.tensor(X[name], dtype=torch.float64)) for name in X)


@pytest.mark.parametrize(
    "options",
    [
        {"self_weight": 0.5, "weighting": "samples"},
        *({"equation7": "printed"} | more for more in ({"self_weight": 0.5}, {"attention_cap": 0.5}, {"self_floor": 0.5})),
        {"equation7": "printed", "weighting": "samples"},
    ],
)
def test_weights_that_contradict_each_other_are_refused(options):
    with pytest.raises(SettingError, match=r"leave .* out"):
        AttentionSettings(**options)


def test_large_sigma_is_the_identity_for_distinct_directions():
    X_SD = rows_of(6, 50, 2, 0.9)
    assert close(mixed(X_SD, 1e6), X_SD, X_SD)


def test_large_sigma_averages_equal_directions():
    """Rows 0 and 1 point the same way, so each is half of the other for every sigma."""
    X_SD = torch.tensor([[1.0, 1.0], [3.0, 3.0], [1.0, -1.0]])
    assert torch.allclose(mixed(X_SD, 1e6), torch.tensor([[2.0, 2.0], [2.0, 2.0], [1.0, -1.0]]), atol=1e-4)


def test_zero_vectors_have_cosine_zero_even_with_themselves():
    A_SS = attention(cosines(gram(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))), math.log(3))
    assert torch.allclose(A_SS, torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64))


def test_components_are_independent_and_keep_shape_and_dtype():
    """Check that a layer's weight and bias share one attention; tensor-wise each has its own (errata E4)."""
    layer = {"l.weight": torch.randn(3, 4, 2), "l.bias": torch.randn(3), "count": torch.tensor(4)}
    other = {"l.weight": torch.randn(3, 4, 2), "l.bias": torch.randn(3), "count": torch.tensor(8)}
    for components, groups in (("layer", [["l.weight", "l.bias"]]), ("tensor", [["l.weight"], ["l.bias"]])):
        vault = MemoryVault()
        aggregator = Mcsa(
            AttentionSettings(sigma=3.0, components=components), vault, 0, {"l": ["l.weight", "l.bias"], "count": ["count"]}
        )
        aggregator.start(layer)
        aggregator.close_round([PartUpdate("a", 1, layer), PartUpdate("b", 1, other)])
        result = vault.read("client/a")
        for names in groups:
            rows = [torch.cat([tensors[name].flatten() for name in names]).tolist() for tensors in (layer, other)]
            expected = torch.tensor(oracle(rows, 3.0)[1][0], dtype=torch.float64)
            assert torch.allclose(torch.cat([result[name].flatten() for name in names]).double(), expected, atol=1e-6)
        assert {name: (t.shape, t.dtype) for name, t in result.items()} == {n: (t.shape, t.dtype) for n, t in layer.items()}
        assert result["count"].item() == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype):
    X_SD = rows_of(4, 20, 4, 0.5).to(dtype)
    W_SD = mixed(X_SD, 10.0)
    assert W_SD.dtype == dtype
    expected = torch.tensor(oracle(X_SD.double().tolist(), 10.0)[1], dtype=torch.float64)
    assert close(W_SD, expected, X_SD.double(), tolerance=max(float(torch.finfo(dtype).eps), 1e-12))


def update(name: str, x: list[float]) -> PartUpdate:
    return PartUpdate(name, 1, {"x": torch.tensor(x)})


def test_state_is_kept_by_name_for_who_is_not_in_the_cohort():
    vault = MemoryVault()
    aggregator = Mcsa(AttentionSettings(), vault, 0, {"x": ["x"]})
    aggregator.start({"x": torch.zeros(2)})
    assert aggregator.slot("a") == "cold-start"
    aggregator.close_round([update("a", [1.0, 0.0]), update("b", [0.0, 1.0])])
    kept = vault.read("client/a")["x"].clone()
    aggregator.close_round([update("b", [5.0, 5.0]), update("c", [2.0, 1.0])])
    assert torch.equal(vault.read(aggregator.slot("a"))["x"], kept)
    assert aggregator.slot("c") == "client/c" and aggregator.slot("d") == "cold-start"


def test_metric_is_the_mean_weight_on_oneself():
    vault = MemoryVault()
    aggregator = Mcsa(AttentionSettings(sigma=math.log(3)), vault, 0, {"x": ["x"]})
    aggregator.start({"x": torch.zeros(2)})
    metrics = aggregator.close_round([update("a", [1.0, 0.0]), update("b", [0.0, 1.0])])
    assert metrics == {"self_attention/x": pytest.approx(0.75)}
