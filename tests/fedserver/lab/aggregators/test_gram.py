"""Products and mixtures by blocks against float64: the bound of 1e-6, seams between blocks, and values near an origin."""

import pytest
import torch

from attune.common.exchange.transform import PartUpdate
from attune.common.methods.settings.aggregators import AttentionSettings
from attune.fedserver.lab.aggregators import votes as subject
from attune.fedserver.lab.aggregators.attention import Mcsa, cosines
from attune.fedserver.lab.aggregators.base import MemoryVault
from attune.fedserver.lab.aggregators.votes import BLOCK, EXACT, gram, mix_


def rows_of(S: int, D: int, spread: float, seed: int = 0) -> torch.Tensor:
    """Return a common row plus `spread` times a row of each client's own. All values are off zero on average: errors add up."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(1, D, generator=draw) + 0.5 + spread * torch.randn(S, D, generator=draw)


@pytest.mark.parametrize("D", [EXACT - 1, EXACT, 100_001])
@pytest.mark.parametrize(("sigma", "spread"), [(0.0, 0.3), (50.0, 0.2), (50.0, 1.0), (100.0, 0.1), (1000.0, 0.06)])
def test_attended_values_are_within_1e_6_of_float64(D, sigma, spread):
    """Test spreads for which sigma * (1 - cos) is about 1, where an error of the cosine counts most."""
    X_SD = rows_of(6, D, spread)
    exact_SD = X_SD.double()
    norm_S1 = exact_SD.norm(dim=1, keepdim=True)
    expected_SD = (sigma * (exact_SD @ exact_SD.T) / (norm_S1 @ norm_S1.T)).softmax(dim=1) @ exact_SD
    vault = MemoryVault()
    aggregator = Mcsa(AttentionSettings(sigma=sigma), vault, 0, {"x": ["x"]})
    aggregator.start({"x": X_SD[0]})
    aggregator.close_round([PartUpdate(f"{i}", 1, {"x": row_D}) for i, row_D in enumerate(X_SD)])
    served_SD = torch.stack([vault.read(f"client/{i}")["x"] for i in range(6)])
    assert float((served_SD - expected_SD).abs().max() / exact_SD.abs().max()) <= 1e-6
    assert float((served_SD - expected_SD).norm() / expected_SD.norm()) <= 1e-6


def test_a_cosine_of_a_large_component_is_within_3e_7():
    X_SD = rows_of(4, EXACT + 17, 0.5)
    exact_SS = X_SD.double() @ X_SD.double().T
    assert float((cosines(gram(X_SD)) - cosines(exact_SS)).abs().max()) <= 3e-7


@pytest.mark.parametrize("exact", [0, EXACT])
@pytest.mark.parametrize("D", [0, 1, 6, 7, 8, 40])
def test_blocks_join_without_a_seam(monkeypatch, D, exact):
    monkeypatch.setattr(subject, "BLOCK", 7)
    monkeypatch.setattr(subject, "EXACT", exact)
    X_SD = torch.arange(3 * D, dtype=torch.float32).view(3, D)
    A_SS = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [2.0, 0.0, 0.0]], dtype=torch.float64)
    assert torch.equal(gram(X_SD), X_SD.double() @ X_SD.double().T)
    expected_SD = torch.stack([X_SD[1], (X_SD[0] + X_SD[2]) / 2, 2 * X_SD[0]])
    mix_(X_SD, A_SS)
    assert torch.equal(X_SD, expected_SD)


def test_float64_rows_are_multiplied_in_float64():
    X_SD = 1 + 1e-12 * torch.randn(2, 2 * BLOCK, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(gram(X_SD), X_SD @ X_SD.T, rtol=1e-14, atol=0)


def test_from_first_is_the_product_of_differences():
    """Test rows 1e-4 apart around 1: products of the rows themselves lose the distance in float32."""
    X_SD = 1 + 1e-4 * rows_of(3, EXACT, 1.0)
    difference_SD = X_SD.double() - X_SD[:1].double()
    assert torch.allclose(gram(X_SD, from_first=True), difference_SD @ difference_SD.T, rtol=1e-6, atol=1e-12)
