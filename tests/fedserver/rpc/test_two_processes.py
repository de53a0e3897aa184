"""Two processes with one identity: the later one ends with an error, and the operator sees it. A dead one holds up nobody."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from attune.common import aio
from attune.common.errors import Replaced
from attune.common.exchange.messages import Beat, Hello
from attune.common.plan import Profile
from attune.common.protocol import PROCESS_KEY
from attune.fedserver.federation.members import Members
from attune.fedserver.federation.steps import Troubles, Turns
from attune.fedserver.federation.streams import Stream, Streams
from attune.fedserver.identity.registrar import Caller
from attune.fedserver.rpc.auth import CALLER
from attune.fedserver.rpc.pulses import DevicePulses
from attune.fedserver.rpc.service import FederationService

EVERY_S = 0.2


class RealStreams(Members):
    """Members without a round: what is tested are streams and troubles."""

    def __init__(self) -> None:
        self._streams = Streams()
        self._state: Any = SimpleNamespace(troubles=Troubles())

    def connect(self, name: str, hello: Hello, process: str = "") -> Stream:
        stream = Stream(name, Profile(kind="tabular", shape=(3,), labels=[0, 1], samples=20, test_samples=5), process=process)
        self._streams.enter(stream)
        return stream

    def disconnect(self, stream: Stream) -> None:
        if self._streams.leave(stream):
            self._state.troubles.clear(f"two processes use the identity of {stream.name}")


class Context:
    """Call of one process, which says Hello, beats once, and then beats on or is silent."""

    def __init__(self, process: str, alive: bool) -> None:
        self.process, self.alive, self._reads = process, alive, 0

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((PROCESS_KEY, self.process),) if self.process else ()

    def peer(self) -> str:
        return "ipv4:192.0.2.7:1234"

    async def read(self) -> Any:
        self._reads += 1
        if self._reads == 1:
            return Hello("test", b"{}")
        if self._reads > 2:
            if not self.alive:
                await asyncio.Event().wait()
            await asyncio.sleep(EVERY_S / 2)
        return Beat(EVERY_S)

    async def write(self, message: object) -> None:
        await asyncio.sleep(0)


def play(first: Context, second: Context) -> tuple[str, list[str]]:
    """Return how the second process fares, and the troubles at that time."""
    members = RealStreams()
    pulses = DevicePulses(EVERY_S)
    service = FederationService(members, None, None, pulses, Turns())  # type: ignore[arg-type]

    async def main() -> tuple[str, list[str]]:
        CALLER.set(Caller("device", "ada", "f"))
        looking = asyncio.create_task(pulses.run())
        one = asyncio.create_task(service.connect(object(), first))  # type: ignore[arg-type]
        await asyncio.sleep(EVERY_S / 4)
        two = asyncio.create_task(service.connect(object(), second))  # type: ignore[arg-type]
        try:
            async with aio.timeout(20):
                while not two.done():
                    stream = members._streams.get("ada")
                    if stream is not None and stream.process == second.process:
                        return "in", members._state.troubles.lines
                    await asyncio.sleep(0.01)
            error = two.exception()
            assert isinstance(error, Replaced), error
            assert not one.done()
            return "turned away", members._state.troubles.lines
        finally:
            for task in (one, two, looking):
                task.cancel()
            await asyncio.gather(one, two, looking, return_exceptions=True)

    return aio.run(main())


def test_the_later_of_two_living_processes_is_turned_away_and_the_operator_sees_it(caplog: pytest.LogCaptureFixture) -> None:
    how, troubles = play(Context("one", alive=True), Context("two", alive=True))
    assert how == "turned away"
    assert len(troubles) == 1 and "two processes use the identity of ada" in troubles[0] and "192.0.2.7" in troubles[0]
    assert "revoke ada" in caplog.text and "trying again" not in caplog.text, "nothing is tried: a person must act"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Context("one", alive=False), Context("two", alive=True)),  # its machine has crashed
        (Context("one", alive=True), Context("one", alive=True)),  # the same process, after a break
        (Context("", alive=True), Context("", alive=True)),  # older devices do not say
    ],
    ids=["dead", "same", "older"],
)
def test_a_process_comes_in_where_no_other_lives(first: Context, second: Context) -> None:
    assert play(first, second) == ("in", [])
