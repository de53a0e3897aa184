"""The quick check compares with the committed row, and says so if there is none."""

from __future__ import annotations

import json

import pytest

from benchmarks import hypernetwork, quick


@pytest.fixture
def results(tmp_path, monkeypatch):
    (tmp_path / "round.json").write_text(json.dumps({"rows": [{"clients": 2, "tls_s": 1}, {"clients": 8, "tls_s": 2}]}))
    monkeypatch.setattr(quick, "RESULTS", tmp_path)


def test_the_row_that_is_alike_is_the_one_compared_with(results):
    assert quick.committed("round.json", "rows", clients=8) == {"clients": 8, "tls_s": 2}
    assert quick.committed("round.json", "rows", clients=4) is None
    assert quick.committed("absent.json", "rows", clients=8) is None


def test_a_line_has_both_figures_and_their_ratio():
    assert quick.shown(("x", 3.0, 2.0)) == "x: now 3, committed 2, ratio 1.50"
    assert quick.shown(("x", 3.0, None)) == "x: now 3, nothing committed"


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
