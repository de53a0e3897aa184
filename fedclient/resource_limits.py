"""Resources of the machine that a device may use, and when: priority, memory, disk, bandwidth, only while idle or charging.

The device's owner sets them; servers cannot.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from attune.common.errors import LimitExceeded, SettingError

STATES = ("idle", "charging")
_HOURS = re.compile(r"(?P<begin>([01]\d|2[0-3]):[0-5]\d)-(?P<end>([01]\d|2[0-3]):[0-5]\d)")
POWER = Path("/sys/class/power_supply")
BUSY_SHARE = 0.25  # load for each processor up to which the machine counts as idle
LOOK_S = 10.0


class ResourceLimits(msgspec.Struct, frozen=True):
    """Bounds on the machine's resources; the defaults set none.

    Attributes:
        nice: 0 to 19.
        memory_bytes: Most memory of this process.
        disk_bytes: Most bytes in the home.
        bytes_per_s: Most bytes per second in both directions together.
        when: "idle", "charging" and hours such as "22:00-06:00", in local time. With several hours, one of them must be.

    Raises:
        SettingError: A word of `when` is none of these.
    """

    nice: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    bytes_per_s: float = 0.0
    when: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if wrong := [word for word in self.when if word not in STATES and not _HOURS.fullmatch(word)]:
            raise SettingError(
                f"a device trains only when it is idle or charging, or at hours such as 22:00-06:00, not {wrong[0]!r} "
                "(--only-when)"
            )

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


def unmet(
    when: Collection[str],
    load: Callable[[], float] = lambda: os.getloadavg()[0],
    power: Path = POWER,
    clock: Callable[[], str] = lambda: time.strftime("%H:%M"),
) -> str:
    """Return in words why the device does not train now; empty if it may.

    Args:
        when: The conditions.
        load: Returns how many processes want to run, as a mean over a minute.
        power: The folder with the system's power supplies.
        clock: Returns the local time as HH:MM.
    """
    hours = [match for match in map(_HOURS.fullmatch, when) if match]
    now = clock()
    if hours and not any(_is_within(now, match["begin"], match["end"]) for match in hours):
        return f"it is {now}, and this device trains at {', '.join(match[0] for match in hours)}"
    if "charging" in when and on_battery(power):
        return "it runs on its battery"
    if "idle" in when:
        processors = os.cpu_count() or 1
        if (wanting := load()) > BUSY_SHARE * processors:
            return f"the machine is busy ({wanting:.1f} of {processors} processors)"
    return ""


def _is_within(now: str, begin: str, end: str) -> bool:
    """Return whether a time of day is within hours, which may go over midnight. Equal ends mean the whole day."""
    return begin <= now < end if begin < end else now >= begin or now < end


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


async def until_met(when: Collection[str], say: Callable[[str], None], why: Callable[[Collection[str]], str] = unmet) -> None:
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
