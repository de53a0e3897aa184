"""Figures of what devices keep beside ordinary models alone, by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.kept_alone import row_of


def client(alone: float | None, kept: float, better: int, worse: int) -> dict[str, Any]:
    return {
        "accuracy_alone": alone, "accuracy_kept": kept, "accuracy_before": 0.5, "test_samples": 40,
        "kept_better_than_alone": better, "kept_worse_than_alone": worse,
    }  # fmt: skip


def test_a_device_is_harmed_if_it_is_worse_than_alone_by_more_than_chance() -> None:
    """12 losses without a win have p = 2 / 2^12; one loss has p = 1. A device without ordinary models does not count."""
    clients = [client(0.9, 0.6, 0, 12), client(0.8, 0.775, 0, 1), client(0.4, 1.0, 24, 0), client(None, 0.1, 0, 40)]
    assert row_of({"clients": clients}) == {"devices": 3, "kept": 0.7917, "alone": 0.7, "own": 0.5, "harmed": 0.3333}
