"""What executors are called; apart from their code, because `--help` must not load torch."""

from __future__ import annotations

SEQUENTIAL, STACKED, AUTO, PROCESSES = "sequential", "stacked", "auto", "processes"
NAMES = (SEQUENTIAL, STACKED, AUTO, PROCESSES)
SPREAD = (PROCESSES,)  # over other processes: what these cannot import cannot be used
