"""Benchmarks of speed: exponents of growth, the quick check against committed rows, and the table of targets."""

import csv
import json

import pytest
import torch
from click.testing import CliRunner

from benchmarks import encoding_speed, growth, hypernetwork, quick, target_tables


def test_an_exponent_is_that_of_the_power():
    sizes = [1, 4, 16, 64]
    assert growth.exponent(sizes, [3 * size**0.5 for size in sizes]) == pytest.approx(0.5)
    assert growth.exponent(sizes, [1, 0, 2, 3]) is None and growth.exponent([1], [1]) is None


def test_the_last_three_points_are_fitted_by_themselves():
    rows = [dict.fromkeys(growth.FIGURES, value) | {"clients": n} for n, value in ((1, 5), (2, 5), (4, 10), (8, 20))]
    assert growth.fitted("clients", rows)["median_s"]["last_three"] == 1.0
    assert 0 < growth.fitted("clients", rows)["median_s"]["all"] < 1.0


def test_cases_above_the_limit_are_left_out_and_none_is_measured_twice(monkeypatch, tmp_path):
    measured = []

    def measure(case):
        measured.append(case)
        return dict.fromkeys(growth.FIGURES, case.clients * case.parameters) | {
            "clients": case.clients,
            "parameters": case.parameters,
        }

    monkeypatch.setattr(growth, "measure", measure)
    out = tmp_path / "growth.json"
    said = CliRunner().invoke(growth.main, ["--most", "500000", "--out", str(out)], catch_exceptions=False)
    assert said.exit_code == 0 and len(measured) == len(set(measured))
    series = json.loads(out.read_text())["series"]
    assert [row["clients"] for row in series["devices, 10^5 parameters"]["rows"]] == [1, 2, 4]
    assert series["parameters, 4 devices"]["exponents"]["median_s"]["all"] == 1.0


def test_what_is_committed_is_found():
    """Check that rows are found: a renamed key would make every line `nothing committed`."""
    assert quick.committed("round.json", "rows", clients=2, parameters=1_000_000, rtt_ms=0.0)
    assert quick.committed("mcsa.json", "cases", clients=10, weights=10_000_000)
    assert quick.committed("hypernetwork.json", "cases", optimiser="sgd")


@pytest.mark.parametrize(("optimiser", "touched"), [("sgd", 16), ("adam", 24)])
def test_a_step_must_touch_every_weight_and_moment_once_each_way(optimiser, touched):
    found = hypernetwork.measure(optimiser, clients=2, block=16, repeats=1)
    assert found["weights"] == 151 * 8 * 16 and found["must_touch_bytes"] == touched * found["weights"]
    assert found["times_the_roof"] > 0


@pytest.mark.parametrize(("devices", "parameters"), target_tables.ROUNDS)
def test_a_target_of_a_round_has_the_row_without_delay(devices, parameters):
    with (target_tables.RESULTS / "round.csv").open(newline="", encoding="utf-8") as file:
        row = next(
            row
            for row in csv.DictReader(file)
            if (row["clients"], row["parameters"], row["tensors"], row["rtt_ms"]) == (str(devices), str(parameters), "8", "0.0")
        )
    work = f"round, {devices} x {parameters // 1_000_000} M"
    line = next(line for line in target_tables.targets() if line.startswith(f"| {work} |"))
    assert f"| {float(row['median_s']):.3g} s |" in line


# --- benchmarks of encodings: sizes are those of the bytes, and rows that are there stay


@pytest.mark.parametrize(("encoding", "share"), [("bf16", 0.5), ("int8", 0.25 * (1 + 1 / 64)), ("zstd", None)])
def test_the_bytes_of_an_encoding_are_a_share_of_the_plain_ones(encoding, share):
    draw = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(256, 256, generator=draw) * 0.05}
    tensors = {"w": base["w"] + 0.0005 * torch.randn(256, 256, generator=draw)}
    found = encoding_speed.measure(encoding, tensors, base)
    assert found["encoding"] == encoding and found["write_ms_per_mib"] >= 0 and found["read_ms_per_mib"] >= 0
    assert found["bytes"] == pytest.approx(share, abs=0.002) if share else 0.5 < found["bytes"] < 1.0
