"""Resident memory of another process, from Linux's /proc."""

from __future__ import annotations

from pathlib import Path


def status_bytes(pid: int, key: str) -> int:
    """VmRSS (now) or VmHWM (peak). Errors: OSError if the process is gone, KeyError for another key."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)


def reset_peak(pid: int) -> None:
    """VmHWM := VmRSS."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
