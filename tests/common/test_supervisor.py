"""Signs of life to systemd, over a real datagram socket."""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

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


async def test_a_service_is_ready_beats_says_its_status_and_stops(heard: Callable[[], list[str]]) -> None:
    async with supervised(lambda: "round 3\nof 10"):
        await asyncio.sleep(0.5)
        messages = heard()
    assert messages[0] == "READY=1\nSTATUS=round 3 of 10"
    assert len([message for message in messages if message == "WATCHDOG=1\nSTATUS=round 3 of 10"]) >= 3
    assert heard() == ["STOPPING=1"]


async def test_a_hung_event_loop_does_not_beat(heard: Callable[[], list[str]]) -> None:
    async with supervised(lambda: ""):
        await asyncio.sleep(0.2)
        assert any(message.startswith("WATCHDOG=1") for message in heard())
        time.sleep(0.6)  # noqa: ASYNC251 (the loop hangs, for twice the time that the supervisor waits)
        assert heard() == []


@pytest.mark.parametrize("variable", ["WATCHDOG_USEC", "WATCHDOG_PID"])
async def test_a_process_that_is_not_watched_does_not_beat(heard: Callable[[], list[str]], monkeypatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1" if variable == "WATCHDOG_PID" else "")
    async with supervised(lambda: "x"):
        await asyncio.sleep(0.3)
        assert heard() == ["READY=1\nSTATUS=x", "STATUS=x"]


async def test_without_a_supervisor_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    async with supervised(lambda: pytest.fail("nobody asks")):
        await asyncio.sleep(0)


async def test_a_supervisor_that_is_gone_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    async with supervised(lambda: ""):
        pass
