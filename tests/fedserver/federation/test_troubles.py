"""Obstacles of a server: a watch that fails is started again, and the operator is told."""

from __future__ import annotations

import asyncio

import pytest

from attune.common import aio
from attune.fedserver.federation import steps
from attune.fedserver.federation.steps import Troubles


def test_a_watch_that_fails_is_started_again_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steps, "FIRST_DELAY_S", 0.0)
    troubles, begun = Troubles(), list[int]()

    async def watch() -> None:
        begun.append(len(begun))
        if len(begun) < 3:
            raise ValueError("a page of S3 that nobody expected")

    aio.run(troubles.keep_up("the watch on direct transfers", watch))
    assert begun == [0, 1, 2]
    [line] = troubles.lines
    assert line == (
        "the watch on direct transfers: it failed, and was started again (ValueError: a page of S3 that nobody expected)"
    )
    assert "Traceback" in caplog.text


def test_a_watch_ends_when_the_server_does() -> None:
    async def scenario() -> None:
        watching = asyncio.create_task(Troubles().keep_up("the watch on streams", asyncio.Event().wait))
        await asyncio.sleep(0)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching

    aio.run(scenario())
