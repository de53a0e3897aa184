"""Finished federations as rows of a table: accuracies by the protocols of both papers, over clients and over samples."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from attune.common.metrics import RIVALS
from attune.common.statistics import findings_of, pairs_of
from benchmarks.federation import Ended

TRIAL = ("validation_accuracy", "validation_over_samples", "constant_over_samples", "seconds")
LATEST = ("before", "after", "common", "local", "constant")
COLUMNS = (
    "task", "method", "seed", "settings", "model", "rounds", "clients", "mean_over_clients", "over_samples", "lowest",
    "fedtp_mean", "fedtp_deviation", "fedtp_over_clients", "bmta", "bmta_round", "mean_of_last", "last", "bmta_over_samples",
    "bmta_over_samples_round", "mean_of_last_over_samples", *LATEST, *(f"{name}_over_samples" for name in LATEST),
    "no_better_than_constant", "harmed", "kept", "kept_accuracy", "seconds",
)  # fmt: skip


def figures(ended: Ended) -> dict[str, Any]:
    """Return a federation in one row, by the protocols of both papers."""
    summary = ended.summary
    latest, fedtp, fedmcsa = summary["latest"], summary["fedtp"] or {}, summary["fedmcsa"] or {}
    known: dict[str, dict[str, float]] = {key: latest.get(key, {}) for key in LATEST}
    means = {key: known[key].get("mean_over_clients") for key in LATEST}
    means |= {f"{key}_over_samples": known[key].get("over_samples") for key in LATEST}
    kept = [client["accuracy_kept"] for client in ended.status["clients"] if client["accuracy_kept"] is not None]
    row = {
        "model": ended.status["model"],
        "rounds": summary["closed"],
        "clients": len(summary["clients"]),
        "mean_over_clients": latest["accuracy"]["mean_over_clients"],
        "over_samples": latest["accuracy"]["over_samples"],
        "lowest": min(client["accuracy"] for client in summary["clients"] if client["accuracy"] is not None),
        "fedtp_mean": fedtp.get("mean"),
        "fedtp_deviation": fedtp.get("deviation"),
        "fedtp_over_clients": fedtp.get("mean_over_clients"),
        "last": fedmcsa.get("evaluations"),
        **{name: fedmcsa.get(name) for name in COLUMNS if name.startswith(("bmta", "mean_of_last"))},
        **means,
        "no_better_than_constant": len(summary["no_better_than_constant"]),
        "harmed": harmed(ended.status),
        "kept_accuracy": fmean(kept) if kept else None,
        "kept": " ".join(f"{name}:{count}" for name, count in summary["kept"].items()),
        "seconds": round(ended.seconds, 1),
    }
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def trial_figures(ended: Ended) -> dict[str, Any]:
    """Return a trial in one row."""
    latest = ended.summary["latest"]
    return {
        "validation_accuracy": round(latest["accuracy"]["mean_over_clients"], 4),
        "validation_over_samples": round(latest["accuracy"]["over_samples"], 4),
        "constant_over_samples": round(latest["constant"]["over_samples"], 4) if "constant" in latest else None,
        "seconds": round(ended.seconds, 1),
    }


def harmed(status: dict[str, Any]) -> int | None:
    """Return the number of clients whose own model is worse than a rival (exact paired test), or None without comparisons."""
    findings = [findings_of(pairs) for client in status["clients"] if (pairs := pairs_of(client, RIVALS))]
    return sum("worse" in found.values() for found in findings) if findings else None
