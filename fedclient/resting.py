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
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, cast

from attune.common import aio, supervisor
from attune.common.errors import AttuneError
from attune.common.exchange.messages import Farewell, Hello, Welcome
from attune.fedclient import client, messages
from attune.fedclient.console import Console
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.device import Device
from attune.fedclient.disclosure_log import DisclosureLog
from attune.fedclient.home import DeviceHome, Identity
from attune.fedclient.link.grpc_link import GrpcLink
from attune.fedclient.options import DeviceOptions
from attune.fedclient.store import FolderStore
from attune.fedclient.work.processes.pipe import receive, send, start_helper
from attune.fedclient.work.worker import Worker

PROGRAM = "import sys; from attune.fedclient.resting import main; main(int(sys.argv[1]))"
MOST_DEATHS = 3  # of the process that trains, without a rest between them
LIGHT = (messages.Say, messages.Reconnect, messages.GiveUp, messages.Yield, messages.Refuse, messages.Keep)


class RestingDevice(Device):
    """Device that holds the stream, without data, until there is work: then `wanted` is done, with what woke it.

    Its stream stays open until the server has closed it for that of the process that trains.
    """

    def __init__(self, rested: messages.Rested, options: DeviceOptions, home: DeviceHome, console: Console) -> None:
        identity, log = cast(Identity, home.identity()), DisclosureLog(home.path)
        link = GrpcLink(options.server, identity, home.keep, log=log, process=options.process)
        super().__init__(options, cast(LazyShard, None), FolderStore(home), link, console, Worker())
        self.session, self._said = rested.args
        self.wanted: asyncio.Future[tuple[messages.Event, ...]] = asyncio.get_running_loop().create_future()

    async def _hello(self) -> Hello:
        return cast(Hello, self._said)

    async def _perform(self, effect: messages.Effect) -> None:
        await (super()._perform(effect) if isinstance(effect, LIGHT) else self._wake())

    async def _keep(self, message: str) -> Path | None:
        # The server may be gone before the process that trains has connected.
        return await self._wake(Welcome(cast(bytes, self.session.plan_json)), Farewell(message))

    async def _wake(self, *events: messages.Event) -> NoReturn:
        self.link.renews = False
        self.wanted.set_result(events)
        await asyncio.wait([self.stream])
        raise asyncio.CancelledError


class RelayedConsole(Console):
    """Console of the process that trains: the other one writes its lines."""

    def __init__(self, end: Connection) -> None:
        self._end, self._lock = end, threading.Lock()

    def relay(self, message: object) -> None:
        with self._lock:
            send(self._end, message)

    def say(self, text: str) -> None:
        self.relay(("say", text))

    def progress(self, what: str, done: float) -> None:
        self.relay(("progress", what, done))


def main(descriptor: int) -> NoReturn:
    """Train for the process at the other end of this socket, and end when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process
    os.environ.pop(supervisor.SOCKET, None)
    end = Connection(descriptor)
    options: DeviceOptions = receive(end)
    threading.Thread(target=_follow, args=(end,), daemon=True).start()
    console = RelayedConsole(end)
    try:
        console.relay(client.run(options, console))
    except Exception as error:
        from attune.fedclient.work.processes.hosted import portable

        if not isinstance(error, (messages.Rested, AttuneError, OSError)):
            traceback.print_exc()  # the other process only knows what is raised here
        console.relay(portable(error))
    os._exit(0)  # to tear down torch takes longer than a device should be away


def _follow(end: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        receive(end)
    os._exit(1)


def run(options: DeviceOptions, console: Console, rest_s: float) -> Path:
    """Run one device as `client.run` does, by a process that trains and ends after `rest_s` seconds without work."""
    return aio.run_blocking(_alternating(replace(options, process=secrets.token_hex(8)), console, rest_s))


async def _alternating(options: DeviceOptions, console: Console, rest_s: float) -> Path:
    home = client.home_of(options)
    async with supervisor.supervised(lambda: console.last_line):
        while isinstance(outcome := await _worked(replace(options, rest_s=rest_s), console), messages.Rested):
            with home.locked():
                resting = RestingDevice(outcome, options, home, console)
                ends: list[asyncio.Future[Any]] = [resting.wanted, asyncio.ensure_future(resting.run())]
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                options = replace(options, woken_by=done.pop().result())
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def _worked(options: DeviceOptions, console: Console) -> Path | Exception:
    """Return the outcome of a process that trains: the model's path, Rested, or the error that ended the device."""
    for _ in range(MOST_DEATHS):
        process, end = start_helper(PROGRAM)
        try:
            send(end, options)
            while isinstance(message := await asyncio.to_thread(receive, end), tuple):
                (console.say if message[0] == "say" else console.progress)(*message[1:])
            return cast(Path | Exception, message)
        except (EOFError, OSError):
            code = process.wait()
            console.say(f"the process that trains has ended ({f'signal {-code}' if code < 0 else f'exit code {code}'})")
        finally:
            process.kill()
            process.wait()
    raise AttuneError(f"the process that trains has ended {MOST_DEATHS} times without a rest between them")
