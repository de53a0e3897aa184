"""Memory and processor time of another process, from Linux's /proc."""

from __future__ import annotations

import os
from pathlib import Path


def status_bytes(pid: int, key: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of a process.

    Raises:
        OSError: The process is gone.
        KeyError: There is no such key.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)


def reset_peak(pid: int) -> None:
    """Set VmHWM to VmRSS."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def cpu_s(pid: int) -> float:
    """Return the user and system time of all threads so far.

    Raises:
        OSError: The process is gone.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """Return the ids of a process and of its running descendants."""
    children = [int(child) for thread in Path(f"/proc/{pid}/task").iterdir() for child in _children(thread)]
    return [pid, *(below for child in children for below in tree(child))]


def tree_cpu_s(pid: int) -> float:
    """Return the user and system time of a process, of children that it has waited for, and of its running descendants."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0.0
    spent = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return spent + sum(tree_cpu_s(int(child)) for thread in threads for child in _children(thread))


def _children(thread: Path) -> list[str]:
    try:
        return (thread / "children").read_text().split()
    except OSError:
        return []
