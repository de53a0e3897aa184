"""Signs of life to systemd, over a real datagram socket."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attune.common import aio
from attune.common.supervisor import supervised


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """Return what has arrived since the last call, one entry for each message."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))

        def read() -> list[str]:
            messages = []
            while True:
                try:
                    messages.append(listener.recv(4096).decode())
                except BlockingIOError:
                    return messages

        yield read


def test_a_service_is_ready_beats_says_its_status_and_stops(heard: Callable[[], list[str]]) -> None:
    async def serve() -> list[str]:
        async with supervised(lambda: "round 3\nof 10"):
            await asyncio.sleep(0.5)
            return heard()

    messages = aio.run(serve())
    assert messages[0] == "READY=1\nSTATUS=round 3 of 10"
    assert len([message for message in messages if message == "WATCHDOG=1\nSTATUS=round 3 of 10"]) >= 3
    assert heard() == ["STOPPING=1"]


def test_a_hung_event_loop_does_not_beat(heard: Callable[[], list[str]]) -> None:
    async def serve() -> tuple[list[str], list[str]]:
        async with supervised(lambda: ""):
            await asyncio.sleep(0.2)
            before = heard()
            time.sleep(0.6)  # noqa: ASYNC251 (the loop hangs, for twice the time that the supervisor waits)
            return before, heard()

    before, hung = aio.run(serve())
    assert any(message.startswith("WATCHDOG=1") for message in before)
    assert hung == []


@pytest.mark.parametrize("variable", ["WATCHDOG_USEC", "WATCHDOG_PID"])
def test_a_process_that_is_not_watched_does_not_beat(
    heard: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1" if variable == "WATCHDOG_PID" else "")

    async def serve() -> list[str]:
        async with supervised(lambda: "x"):
            await asyncio.sleep(0.3)
            return heard()

    assert aio.run(serve()) == ["READY=1\nSTATUS=x", "STATUS=x"]


def test_without_a_supervisor_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)

    async def serve() -> int:
        async with supervised(lambda: pytest.fail("nobody asks")):
            await asyncio.sleep(0)
            return 1

    assert aio.run(serve()) == 1


def test_a_supervisor_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))

    async def serve() -> int:
        async with supervised(lambda: ""):
            return 1

    assert aio.run(serve()) == 1
