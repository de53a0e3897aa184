"""Names of executors. They are apart from their code, because `--help` must not load torch."""

from __future__ import annotations

SEQUENTIAL, STACKED, AUTO, PROCESSES, RAY = "sequential", "stacked", "auto", "processes", "ray"
NAMES = (SEQUENTIAL, STACKED, AUTO, PROCESSES, RAY)
SPREAD = (PROCESSES, RAY)  # devices run in other processes, which must be able to import the model
