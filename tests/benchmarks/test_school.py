"""School: pupils are divided by school, and what is left to do does not depend on an interruption."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import school
from benchmarks.result_file import Results


def data(schools: int, pupils: int) -> dict[str, np.ndarray]:
    """Return pupils whose first feature is their number, and whose scores follow the second one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(schools * pupils, 3))
    x[:, 0] = np.arange(len(x))
    return {"x": x, "y": 3 * x[:, 1] + 20, "school": np.repeat(np.arange(schools), pupils)}


def test_rows_that_are_there_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(school, "MOST", (24,))
    monkeypatch.setattr(school, "ROUNDS", 1)
    np.savez(tmp_path / "school.npz", **data(2, 40))
    words = ["--data", str(tmp_path / "school.npz"), "--out", str(tmp_path / "out.csv"), "--seed", "3"]
    done = CliRunner().invoke(school.main, words, catch_exceptions=False)
    rows = Results(tmp_path / "out.csv", ()).rows()
    assert [(row["method"], row["part"]) for row in rows] == [
        (method, part)
        for method, trials in (("local", 2), ("fedavg", 2), ("mr-mtl", 4))
        for part in [*["validation"] * trials, "test"]
    ]
    tried = {row["settings"]: float(row["mse"]) for row in rows[-5:-1]}
    assert rows[-1]["settings"] == min(tried, key=lambda settings: tried[settings])
    monkeypatch.setattr(school.attune, "simulate", None)
    assert CliRunner().invoke(school.main, words, catch_exceptions=False).output == done.output


def test_committed_settings_are_those_that_were_best_on_validation_parts() -> None:
    rows = Results(Path(__file__).parents[2] / "benchmarks/results/school.csv", ()).rows()
    finals = [row for row in rows if row["part"] == "test"]
    assert len(finals) == len(school.MOST) * len(school.METHODS)
    for final in finals:
        same = {name: final[name] for name in ("at_most", "method", "seed")}
        trials = [row for row in rows if row["part"] == "validation" and same.items() <= row.items()]
        assert min(trials, key=lambda row: float(row["mse"]))["settings"] == final["settings"]
