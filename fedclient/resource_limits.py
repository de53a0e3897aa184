"""Resources of the machine that a device may use, and when: priority, memory, disk, bandwidth, only while idle or charging.

The device's owner sets them; servers cannot.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from attune.common.errors import LimitExceeded, SettingError

When = Literal["idle", "charging"]
POWER = Path("/sys/class/power_supply")
BUSY_SHARE = 0.25  # load for each processor up to which the machine counts as idle
LOOK_S = 10.0


@dataclass(frozen=True)
class ResourceLimits:
    """The defaults set no bounds. nice: 0 to 19. memory_bytes: of this process. disk_bytes: of the home."""

    nice: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    bytes_per_s: float = 0.0
    when: tuple[When, ...] = ()

    def apply(self) -> None:
        """Set priority and memory for the whole process.

        Raises:
            SettingError: The system does not allow it.
        """
        try:
            if self.nice:
                os.nice(self.nice)
            if self.memory_bytes:
                import resource

                # Not the address space: torch and CUDA reserve far more of that than they use.
                resource.setrlimit(resource.RLIMIT_DATA, (self.memory_bytes, self.memory_bytes))
        except (ImportError, OSError, ValueError) as error:
            raise SettingError(f"this system does not take --nice or --max-memory: {error}") from None

    def check_disk(self, home: Path, coming_bytes: int) -> None:
        """Check that the home may grow by `coming_bytes`, before an order is carried out.

        Raises:
            LimitExceeded: It would grow beyond what its owner allows.
        """
        if self.disk_bytes and (size := size_of(home) + coming_bytes) > self.disk_bytes:
            raise LimitExceeded(
                f"{home} would have {size:,} bytes with this order, and this device allows {self.disk_bytes:,} (--max-disk)"
            )


NO_BOUNDS = ResourceLimits()


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder and below."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # it was replaced meanwhile
            continue
    return total


def unmet(when: Collection[When], load: Callable[[], float] = lambda: os.getloadavg()[0], power: Path = POWER) -> str:
    """Return in words why the device does not train now; empty if it may.

    Args:
        when: The conditions.
        load: Returns how many processes want to run, as a mean over a minute.
        power: The folder with the system's power supplies.
    """
    if "charging" in when and on_battery(power):
        return "it runs on its battery"
    if "idle" in when:
        processors = os.cpu_count() or 1
        if (now := load()) > BUSY_SHARE * processors:
            return f"the machine is busy ({now:.1f} of {processors} processors)"
    return ""


def on_battery(power: Path = POWER) -> bool:
    """Return whether no mains is plugged in.

    If the system reports no mains, a discharging battery decides. Without a battery the answer is False.
    """
    supplies = {path: _word(path / "type") for path in sorted(power.glob("*"))}
    mains = [path for path, kind in supplies.items() if kind in ("Mains", "USB")]
    if mains:
        return not any(_word(path / "online") == "1" for path in mains)
    return any(_word(path / "status") == "Discharging" for path, kind in supplies.items() if kind == "Battery")


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


async def until_met(when: Collection[When], say: Callable[[str], None], why: Callable[[Collection[When]], str] = unmet) -> None:
    """Wait until the device may train, and say once why it waits."""
    said = False
    while reason := why(when) if when else "":
        if not said:
            say(f"waiting: {reason}")
            said = True
        await asyncio.sleep(LOOK_S)


class Allowance:
    """Limit on the rate of bytes in both directions together: a device that has moved too many waits."""

    def __init__(self, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = bytes_per_s, clock
        self._paid_until = clock()  # the moment up to which what was moved is paid for

    def __repr__(self) -> str:
        return f"Allowance({self._rate:g} bytes/s)"

    def owed_s(self, size: int) -> float:
        """Return the seconds to wait after `size` more bytes. Idle time is not saved up."""
        if not self._rate:
            return 0.0
        now = self._clock()
        self._paid_until = max(self._paid_until, now) + size / self._rate
        return self._paid_until - now

    async def spend(self, size: int) -> None:
        if (wait_s := self.owed_s(size)) > 0:
            await asyncio.sleep(wait_s)
