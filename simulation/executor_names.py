"""What executors are called; apart from their code, because `--help` must not load torch."""

from __future__ import annotations

SEQUENTIAL, STACKED, AUTO, PROCESSES, RAY = "sequential", "stacked", "auto", "processes", "ray"
NAMES = (SEQUENTIAL, STACKED, AUTO, PROCESSES, RAY)
SPREAD = (PROCESSES, RAY)  # over other processes: what these cannot import cannot be used
