"""Statistics with noise, of which one device of ten, or three, lie."""

from __future__ import annotations

import msgspec
import pytest

from attune.common.errors import UpdateRefused
from attune.common.privacy.noisy_statistics import NoisyColumn, NoisyLayout, NoisySums
from attune.fedserver.surveys.noisy_fleet import noisy_fleet

LAYOUT = NoisyLayout("fed", "example", 1.0, 1e-5, None, {"sex": NoisyColumn(values=["f", "m"])}, ["0"])
HONEST = NoisySums(100, 4.0, [40.0, 59.5, 0.5, 30.0])


def fleet(liars: int, lie: NoisySums) -> dict[str, NoisySums]:
    return {f"d{at}": lie if at < liars else HONEST for at in range(10)}


@pytest.mark.parametrize("liars", [1, 3])
@pytest.mark.parametrize("deviation", [1e9, 1e-9, 40.0])
def test_noise_that_is_not_the_fleets_hides_no_figures(liars: int, deviation: float) -> None:
    """With a deviation of 1e9 no count was clear; with a small one the errors that are shown were too small."""
    lie = msgspec.structs.replace(HONEST, deviation=deviation)
    shown = noisy_fleet(LAYOUT, fleet(liars, lie), {}, {})
    alone = noisy_fleet(LAYOUT, {name: HONEST for name in fleet(0, HONEST) if int(name[1:]) >= liars}, {}, {})
    assert shown.without.keys() == {f"d{at}" for at in range(liars)}
    assert "noise" in shown.without["d0"]
    assert msgspec.structs.replace(shown, without={}) == alone


def test_slightly_different_accountants_are_no_liars() -> None:
    other = msgspec.structs.replace(HONEST, deviation=4.01)
    assert noisy_fleet(LAYOUT, fleet(3, other), {}, {}).without == {}


@pytest.mark.parametrize("value", [100.0 + 12.1 * 4.0, -(100.0 + 12.1 * 4.0), 1e6, float("inf"), float("nan")])
def test_a_sum_beyond_the_samples_and_twelve_deviations_is_refused(value: float) -> None:
    HONEST.check(LAYOUT, 100)
    with pytest.raises(UpdateRefused, match="noisy sums"):
        msgspec.structs.replace(HONEST, values=[value, 59.5, 0.5, 30.0]).check(LAYOUT, 100)
