"""Methods of a table against the first one: a paired test with Holm's correction, where seeds or devices are enough."""

import csv
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from attune.common.statistics import student_p
from attune.simulation.comparison_table import comparison_over_seeds, method_table
from attune.simulation.over_seeds import SeedResults
from attune.simulation.result import DeviceRow, DeviceTable
from attune.simulation.result_table import ResultTable

OTHERS = {
    "alone": None, "local": None, "common": None, "personalized": None, "constant": 0.5, "interval": None,
    "verdict": None,
}  # fmt: skip


def result(method: str, kept: Sequence[float]) -> Any:
    rows = [
        DeviceRow(f"d{at}", 40, accuracy=score, kept=score, served=score, probably=None, keeps="", **OTHERS)  # type: ignore[arg-type]
        for at, score in enumerate(kept)
    ]
    return SimpleNamespace(
        table=lambda: DeviceTable(rows), devices=[row.device for row in rows], title=method, task="classes",
        summary={"model": "mlr", "method": method},
    )  # fmt: skip


def table(kept: Mapping[str, Sequence[Sequence[float]]]) -> ResultTable:
    """Return the table of methods from what each device keeps, by method and seed."""
    return method_table(results(kept))


def results(kept: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, SeedResults]:
    return {name: SeedResults({seed: result(name, one) for seed, one in enumerate(of)}) for name, of in kept.items()}


SEEDS = {
    "fedavg": [[0.5, 0.5], [0.6, 0.6], [0.7, 0.7]],
    "fedper": [[0.61, 0.61], [0.70, 0.70], [0.81, 0.81]],  # 0.11, 0.10, 0.11 better
    "local": [[0.51, 0.51], [0.62, 0.62], [0.73, 0.73]],  # 0.01, 0.02, 0.03 better: p = 0.074
}


def test_over_seeds_by_hand() -> None:
    shown = table(SEEDS)
    assert shown.heads[-2:] == ("against fedavg", "p")
    sharp = student_p((0.32 / 3) / (1e-4 / 3) ** 0.5 * 3**0.5, 2)  # differences of variance 1e-4 / 3
    p = {row[0]: row[-1] for row in shown.rows}
    assert (
        p["fedavg"] is None and p["fedper"] == pytest.approx(2 * sharp) and p["local"] == pytest.approx(student_p(12**0.5, 2))
    )
    assert [row[-2] for row in shown.rows] == ["-", "better", "unclear"]
    assert "paired t-test over 3 seeds" in shown.note and "Holm for 2 methods" in shown.note
    rows = list(csv.DictReader(shown.to_csv().splitlines()))
    assert [row["against fedavg"] for row in rows] == ["-", "better", "unclear"] and rows[0]["p"] == ""
    assert f"% {shown.note}" in shown.to_latex().splitlines() and "better" in shown.to_latex()
    assert f"<caption>{shown.note}</caption>" in shown.to_html()


def test_the_correction_decides() -> None:
    """One comparison with p = 0.03 counts alone, and not beside a second one that is unclear."""
    differences = (0.07, 0.03, 0.05)  # t = 4.33, p = 0.0494
    two = {"fedavg": [[0.5]] * 3, "fedper": [[0.5 + one] for one in differences]}
    assert [row[-2] for row in table(two).rows] == ["-", "better"]
    three = two | {"local": [[0.4], [0.6], [0.5]]}
    assert [row[-2] for row in table(three).rows] == ["-", "unclear", "unclear"]
    lines = comparison_over_seeds([], results(three))
    assert any(
        "fedper against fedavg" in line and "not certainly different" in line and "by Holm for 2" in line for line in lines
    )


def test_with_one_seed_the_devices_are_tested() -> None:
    """Expect p = 2 / 2^7 where all 7 devices are better, and twice that for two methods."""
    kept = {"fedavg": [[0.5] * 7], "fedper": [[0.6] * 7], "local": [[0.6] * 4 + [0.4] * 3]}
    shown = table(kept)
    assert [row[-2:] for row in shown.rows] == [["-", None], ["better", pytest.approx(2 * 2 / 2**7)], ["unclear", 1.0]]
    assert "sign test over 7 devices" in shown.note


@pytest.mark.parametrize("devices", [1, 5, 6])
def test_too_few_seeds_and_devices_mark_nothing(devices: int) -> None:
    """With 6 devices two methods cannot differ: 2 * 2 / 2^6 > 0.05."""
    shown = table({"fedavg": [[0.5] * devices] * 2, "fedper": [[0.9] * devices] * 2, "local": [[0.1] * devices] * 2})
    assert shown.heads[-1] == "worst device" and "too few for 2 methods" in shown.note


def test_one_method_has_no_test() -> None:
    assert table({"fedavg": SEEDS["fedavg"]}).note == "" and table({"fedavg": SEEDS["fedavg"]}).heads[-1] == "worst device"
