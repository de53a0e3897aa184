"""Attacks on privacy in each mode, with what the protocol shows the attacker: benchmarks/visible_by_mode.py.

Without privacy the attacks succeed, so these tests can fail. What secure aggregation leaves visible is in the committed table:
inputs of one or four samples of each device are rebuilt from a sum of five.
"""

import csv
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.visible_by_mode import FEATURES, HALF, NOISY, OVER, PIXELS, inversion, label_counts, membership, over_chance

TABLE = Path(__file__).parents[2] / "benchmarks/results/visible_by_mode.csv"
MEAN_AUC = "AUC, mean over draws of noise"
CHANCE = 0.08  # how far two figures differ by the draw of the noise


def kept(mode: str, attack: str, setting: str = "", measure: str = "") -> float:
    """Return a figure of the committed table."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["mode"], row["attack"]) == (mode, attack)]
    [row] = [row for row in rows if setting in ("", row["setting"]) and row["measure"] == (measure or row["measure"])]
    return float(row["value"])


def rebuilt(mode: str, samples: int, features: int) -> tuple[float, float]:
    """Return the correlation of rebuilt inputs, and that by chance, after a check that they are what the table says."""
    measured = inversion(mode, samples, features)
    setting = f"{features} features, batches of {samples}"
    for value, measure in zip(measured, ("correlation", "correlation by chance"), strict=True):
        assert value == pytest.approx(kept(mode, "inversion", setting, measure), abs=CHANCE if mode in NOISY else 0.03)
    return measured


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("mode", ["plain", "embedding"])
def test_without_privacy_the_server_rebuilds_inputs(mode: str, samples: int) -> None:
    """Keeping the embedding on the device hides nothing by itself: the gradient of the network has the change in it."""
    assert rebuilt(mode, samples, FEATURES)[0] > 0.999


def test_without_privacy_inputs_of_a_larger_batch_are_rebuilt_in_part() -> None:
    assert rebuilt("plain", 16, PIXELS)[0] > 0.6


def test_from_a_sum_of_five_devices_of_16_samples_the_server_rebuilds_no_input() -> None:
    assert rebuilt("secure", 16, PIXELS)[0] < 0.3


def test_with_few_features_what_nobody_has_is_rebuilt_nearly_as_well() -> None:
    """The target of 0.3 is missed here: it is what inputs that nobody has get."""
    correlation, chance = rebuilt("secure", 16, FEATURES)
    assert correlation > 0.3 and chance == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize(("features", "most"), [(FEATURES, 0.12), (PIXELS, 0.2)])
def test_above_chance_a_sum_of_80_samples_shows_little_more_than_class_means(features: int, most: float) -> None:
    found, setting = over_chance("secure", 16, features, federations=4), f"{features} features, batches of 16"
    for name, (mean, half) in found.items():
        known = [kept("secure", f"inversion by {name}", setting, measure) for measure in (OVER, HALF)]
        assert mean == pytest.approx(known[0], abs=half + known[1])
        assert known[1] < 0.01, "the interval of the table is narrow"
    (mean, half), (of_means, _) = found["rebuilt"], found["class means"]
    assert mean + half < most
    assert 0 < of_means < mean < of_means + 0.06


@pytest.mark.parametrize("samples", [1, 4])
def test_what_the_server_rebuilds_from_sums_of_few_samples_is_in_the_table(samples: int) -> None:
    assert rebuilt("secure", samples, PIXELS)[0] > 0.5


@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize("mode", ["example", "client"])
def test_with_noise_nobody_rebuilds_an_input(mode: str, samples: int) -> None:
    correlation, chance = rebuilt(mode, samples, FEATURES)
    assert correlation < chance + CHANCE


def test_label_counts_of_a_device_are_seen_without_privacy_alone() -> None:
    off = {mode: label_counts(mode) for mode in ("plain", "example", "client", "secure", "embedding")}
    assert max(off["plain"], off["embedding"]) < 1
    assert off["example"] > 3
    assert min(off["client"], off["secure"]) > 10
    for mode in ("plain", "secure", "embedding"):
        assert off[mode] == pytest.approx(kept(mode, "label counts"), rel=0.1)


def test_members_are_told_from_others_without_privacy_and_not_with_noise() -> None:
    area = {mode: fmean(membership(mode)) for mode in ("plain", "example", "client", "secure", "embedding")}
    assert min(area["plain"], area["embedding"]) > 0.9
    assert area["example"] <= 0.60
    assert area["client"] <= 0.60
    assert area["secure"] < area["plain"] - 0.2
    for mode, value in area.items():
        assert value == pytest.approx(kept(mode, "membership", measure=MEAN_AUC), abs=0.03)
