"""Device that rests: between orders a process without torch waits, and another one that trains is started for work.

The process that trains is a whole device, as in `client.run`. When it had nothing to do for a while, it ends, and the other one
opens the device's stream. That stream stays open until the next process that trains has opened its own, so the server sees one
device. All that counts is in the home, so either process may be killed at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

from attune.common import aio, supervisor
from attune.common.errors import AttuneError
from attune.common.exchange.messages import Farewell, Hello, Welcome
from attune.fedclient import client, messages
from attune.fedclient.console import Console
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.device import Device
from attune.fedclient.messages import Event
from attune.fedclient.options import DeviceOptions
from attune.fedclient.session import Session
from attune.fedclient.store import FolderStore
from attune.fedclient.work.processes.pipe import receive, send, start_helper
from attune.fedclient.work.worker import Worker

PROGRAM = "import sys; from attune.fedclient.resting import main; main(int(sys.argv[1]))"
MOST_KILLS = 3  # of the process that trains, each sooner than it may rest: then it is its work that kills it
LIGHT = (messages.Say, messages.Reconnect, messages.GiveUp, messages.Yield, messages.Refuse)
BESIDE_WORK = 2  # tasks of a device without work: the stream, and the look at its certificate


class Rested(Exception):
    """Signal that the device has nothing to do: its session, and its first message on a new stream."""

    def __init__(self, session: Session, hello: Hello) -> None:
        super().__init__(session, hello)
        self.session, self.hello = session, hello


@dataclass(frozen=True)
class Start:
    """Start of a process that trains.

    Attributes:
        options: The device's options.
        process: Same as for GrpcLink.
        rest_s: Seconds without work after which it ends.
        woken_by: Events that come before those of its stream.
    """

    options: DeviceOptions
    process: str
    rest_s: float
    woken_by: tuple[Event, ...] = ()


class BusyDevice(Device):
    """Device that raises Rested when it had no work for `start.rest_s` seconds."""

    def __init__(self, start: Start, *parts: Any) -> None:
        super().__init__(*parts)
        self._start_of_process = start
        for event in start.woken_by:
            self.events.put_nowait(event)

    async def _next_event(self) -> Event | BaseException:
        while True:
            with contextlib.suppress(TimeoutError):
                async with aio.timeout(self._start_of_process.rest_s):
                    return await self.events.get()
            if self.link.open.is_set() and len(self.tasks) <= BESIDE_WORK:
                raise Rested(self.session, await self._hello())

    async def _perform(self, effect: messages.Effect) -> None:
        await super()._perform(effect)
        if isinstance(effect, messages.Prepare):
            cast(RelayedConsole, self.console).verb = "say"


class RestingDevice(Device):
    """Device that holds the stream until there is work. It has no data."""

    def __init__(self, rested: Rested, options: DeviceOptions, console: Console, process: str) -> None:
        home = client.home_of(options)
        identity = home.identity()
        assert identity is not None  # noqa: S101 (a device that rests has been connected)
        link = client.link_of(options, identity, home, console.say, process)
        super().__init__(options, cast(LazyShard, None), FolderStore(home), link, console, Worker())
        self.session, self._rested = rested.session, rested

    async def _hello(self) -> Hello:
        return self._rested.hello

    async def wait(self) -> Event:
        """Return the first event that needs tensors. The stream stays open, until it ends or `leave` is called."""
        self.stream = self._spawn(self._stream(0.0))
        renewal = self._spawn(self._keep_renewed())
        try:
            while True:
                event = await self._next_event()
                if isinstance(event, BaseException):
                    raise event
                effects = self.session.on(event)
                if not all(isinstance(effect, LIGHT) for effect in effects):
                    renewal.cancel()
                    return event
                for effect in effects:
                    await self._perform(effect)
        except BaseException:
            await self._end()
            raise

    async def leave(self) -> None:
        """End when the stream does: the process that trains has opened its own."""
        try:
            await asyncio.wait([self.stream])
        finally:
            await self._end()


class RelayedConsole(Console):
    """Console of the process that trains: the other one writes its lines, and those that each start says only once."""

    verb: Literal["begin", "say"] = "begin"

    def __init__(self, end: Connection) -> None:
        self._end, self._lock = end, threading.Lock()

    def relay(self, message: object) -> None:
        with self._lock:
            send(self._end, message)

    def say(self, text: str) -> None:
        self.relay((self.verb, text))

    def progress(self, what: str, done: float) -> None:
        self.relay(("progress", what, done))


def main(descriptor: int) -> NoReturn:
    """Train for the process at the other end of this socket, and end when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process
    os.environ.pop(supervisor.SOCKET, None)
    end = Connection(descriptor)
    start: Start = receive(end)
    threading.Thread(target=_follow, args=(end,), daemon=True).start()
    console, outcome = RelayedConsole(end), cast(object, None)
    try:
        outcome = client.run(start.options, console, device=partial(BusyDevice, start), process=start.process)
    except (Rested, AttuneError, OSError) as ended:
        from attune.fedclient.work.processes.hosted import portable

        outcome = portable(ended)
    console.relay(outcome)
    os._exit(0)  # to tear down torch takes longer than a device may be away


def _follow(end: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        receive(end)
    os._exit(1)


class TrainingProcess:
    """Process that trains, seen from the one that waits."""

    def __init__(self, start: Start, console: Console, known: set[str]) -> None:
        self._console, self._known, self._loop = console, known, asyncio.get_running_loop()
        self._process, self._end = start_helper(PROGRAM)
        send(self._end, start)

    def outcome(self) -> Path | Exception | int:
        """Return the model's path, the error that ended it, Rested, or how it ended without a word: the signal is negative."""
        try:
            while isinstance(message := receive(self._end), tuple):
                verb, *words = message
                if verb == "begin" and words[0] in self._known:
                    continue
                self._known.update(words if verb == "begin" else ())
                write = self._console.progress if verb == "progress" else self._console.say
                self._loop.call_soon_threadsafe(partial(write, *words))
            return cast(Path | Exception, message)
        except (EOFError, OSError):
            return self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def run(options: DeviceOptions, console: Console, rest_s: float) -> Path:
    """Run one device as `client.run` does, with a process that trains while there is work."""
    return aio.run_blocking(_alternating(Start(options, secrets.token_hex(8), rest_s), console))


async def _alternating(start: Start, console: Console) -> Path:
    resting: RestingDevice | None = None
    kills, known = 0, set[str]()
    async with supervisor.supervised(lambda: console.last_line):
        while True:
            began = time.monotonic()
            outcome = await _worked(TrainingProcess(start, console, known), resting)
            start, resting = Start(start.options, start.process, start.rest_s), None
            if isinstance(outcome, Path):
                return outcome
            if isinstance(outcome, int):
                kills = 1 if time.monotonic() - began > start.rest_s else kills + 1
                if outcome >= 0 or kills == MOST_KILLS:
                    raise AttuneError(f"the process that trains has ended ({_how(outcome)})")
                console.say(f"the process that trains has ended ({_how(outcome)}): starting it again")
            elif isinstance(outcome, Rested):
                kills = 0
                with client.home_of(start.options).locked():
                    resting = RestingDevice(outcome, start.options, console, start.process)
                    event = await resting.wait()
                if isinstance(event, Farewell):  # the server may be gone before the other process has connected
                    woken_by = (Welcome(cast(bytes, resting.session.plan_json)), event)
                    start = Start(start.options, start.process, start.rest_s, woken_by)
            else:
                raise outcome


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


async def _worked(process: TrainingProcess, resting: RestingDevice | None) -> Path | Exception | int:
    """Return the outcome of a process that trains. `resting` leaves meanwhile."""
    leaving = asyncio.create_task(resting.leave()) if resting else None
    try:
        return await asyncio.to_thread(process.outcome)
    finally:
        process.close()
        if leaving is not None:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
