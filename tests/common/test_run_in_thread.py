"""An event loop on a thread of its own, and its interruption."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from attune.common.aio import Stopped, run_in_thread


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make Ctrl-C raise, also in a job that was started in the background."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


def _alive() -> int:
    return sum(thread.name == "attune" for thread in threading.enumerate())


def test_what_the_coroutine_returns_or_raises_is_passed_on() -> None:
    async def answer(fails: bool) -> int:
        if fails:
            raise ValueError("no")
        return threading.get_ident()

    assert run_in_thread(lambda stopped: answer(False)) != threading.get_ident()
    with pytest.raises(ValueError, match="no"):
        run_in_thread(lambda stopped: answer(True))
    assert _alive() == 0


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("again", [0, 1, 5], ids=["once", "twice", "often"])
def test_however_often_it_is_interrupted_it_ends_in_order_first(again: int) -> None:
    """Interrupt several times. It must end before it raises, because the caller then closes its ledger and folder."""
    told: list[bool] = []

    async def work(stopped: Stopped) -> None:
        try:
            await asyncio.sleep(0.3)  # until the caller waits, on a busy machine too
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            for _ in range(again):  # interrupt again while the first interruption is handled
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.02)
            told.append(stopped())

    with pytest.raises(KeyboardInterrupt):
        run_in_thread(work)
    assert told == [True]
    assert _alive() == 0
