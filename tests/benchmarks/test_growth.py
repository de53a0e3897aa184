"""Exponents against known powers, and the cases that are measured."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from benchmarks import growth


def test_an_exponent_is_that_of_the_power():
    sizes = [1, 4, 16, 64]
    assert growth.exponent(sizes, [3 * size**0.5 for size in sizes]) == pytest.approx(0.5)
    assert growth.exponent(sizes, [1, 0, 2, 3]) is None and growth.exponent([1], [1]) is None


def test_the_last_three_points_are_fitted_by_themselves():
    rows = [dict.fromkeys(growth.FIGURES, value) | {"clients": n} for n, value in ((1, 5), (2, 5), (4, 10), (8, 20))]
    assert growth.fitted("clients", rows)["median_s"]["last_three"] == 1.0
    assert 0 < growth.fitted("clients", rows)["median_s"]["all"] < 1.0


def test_the_cases_cover_what_is_promised():
    cases = [case for _, some in growth.SERIES.values() for case in some]
    assert {case.clients for case in cases} >= {1, 2, 4, 8, 16, 32, 64}
    assert {case.parameters for case in cases} >= {10**4, 10**5, 10**6, 10**7, 10**8}
    assert max(case.clients * case.parameters for case in cases) == growth.MOST


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
