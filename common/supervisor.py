"""Signs of life to the program that started this process, in the protocol of systemd's sd_notify(3), over a datagram socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable

SOCKET, PERIOD, PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"  # environment variables
STATUS_EVERY_S = 10.0
BEATS = 3  # in the time after which systemd takes this process for hung
LONGEST_STATUS = 200  # characters


def tell(*assignments: str) -> None:
    """Send assignments such as `READY=1`. Without a supervisor, or if it does not listen, nothing is sent."""
    address = os.environ.get(SOCKET, "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        sender.connect(f"\0{address[1:]}" if address.startswith("@") else address)
        sender.send("\n".join(assignments).encode())


@contextlib.asynccontextmanager
async def supervised(status: Callable[[], str], ends: bool = True) -> AsyncIterator[None]:
    """Tell the supervisor that this process is ready, that its event loop runs, and at the end that it stops.

    Args:
        status: Returns one line for people, which `systemctl status` shows.
        ends: Whether the process stops at the end of the block; False: a standby begins to serve.
    """
    if not os.environ.get(SOCKET):
        yield
        return
    tell("READY=1", _line(status))
    beats = asyncio.create_task(_beats(status))
    try:
        yield
    finally:
        beats.cancel()
        if ends:
            tell("STOPPING=1")


async def _beats(status: Callable[[], str]) -> None:
    # A loop that hangs comes back here too late, and systemd ends the process (WatchdogSec).
    pace_s = _watchdog_s() / BEATS
    while True:
        tell(*(["WATCHDOG=1"] if pace_s else []), _line(status))
        await asyncio.sleep(min(pace_s or STATUS_EVERY_S, STATUS_EVERY_S))


def _watchdog_s() -> float:
    """Return the seconds after which the supervisor takes a silent process for hung; 0 if it does not watch this one."""
    period, process = os.environ.get(PERIOD, ""), os.environ.get(PROCESS, str(os.getpid()))
    return int(period) / 1e6 if period.isdecimal() and process == str(os.getpid()) else 0.0


def _line(status: Callable[[], str]) -> str:
    return f"STATUS={' '.join(status().split())[:LONGEST_STATUS]}"
