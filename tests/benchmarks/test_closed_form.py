"""Measurements of `--method analytic` on small federations, and the tables of their figures."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import closed_form, closed_form_tables


def test_each_measurement_runs_and_its_table_has_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, small in {"OUTPUTS": 30, "FEATURES": 10, "OF_OUTPUTS": 3, "POINTS": (("digits", 20.0),), "SEEDS": (0,)}.items():
        monkeypatch.setattr(closed_form, name, small)
    times = {"processor_s": 1.6, "peak_mib": 2000}
    server = {"close_s": 2.0, "check_s": 0.5, "serve_s": 0.25}  # 4.25 s for three devices
    reports = {"devices": closed_form.devices(3, 12), "outputs": closed_form.outputs(), "flipped": closed_form.flipped()}
    for what, report in reports.items():
        (tmp_path / f"closed_form_{what}.json").write_bytes(msgspec.json.encode(report | times | server))
    _, _, of_devices, of_outputs = closed_form_tables.costs(tmp_path)
    assert of_devices.startswith("| 3 | 12 | 10 | simulated, from end to end | 2 s |")
    assert of_outputs.startswith("| 3 | 10 | 30 | the server's part of a round | 4 s |")
    (row,) = reports["flipped"]["rows"]
    assert len(row["flipped"]["places"]) == len(row["flipped"]["misfits"]) == 3
    assert row["flipped"]["common"] < row["clean"]["common"] - 0.05
    *_, line = closed_form_tables.flipped(tmp_path)
    common = f"{100 * row['clean']['common']:.1f} / {100 * row['flipped']['common']:.1f}"
    assert line.startswith(f"| `digits` | 20 | {common} |")
