"""The end of a certificate ends its stream, however busy that is."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from attune.common import aio
from attune.common.errors import CertificateRefused
from attune.common.exchange.messages import Hello, Notice
from attune.common.plan import Profile
from attune.fedserver.federation.steps import Turns
from attune.fedserver.federation.streams import Stream
from attune.fedserver.identity.registrar import Caller
from attune.fedserver.rpc.auth import CALLER
from attune.fedserver.rpc.pulses import DevicePulses
from attune.fedserver.rpc.service import FederationService

LEFT_S, PATIENCE_S = 0.5, 30.0


class Context:
    """Call whose device says Hello and then listens."""

    def __init__(self, busy: bool) -> None:
        self.stream = Stream("ada", Profile(kind="tabular", shape=(3,), labels=[0, 1], samples=20, test_samples=5))
        self.busy, self.written, self._hello = busy, 0, True

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> Any:
        if self._hello:
            self._hello = False
            return Hello("test", b"{}")
        return await asyncio.Event().wait()

    async def write(self, message: object) -> None:
        self.written += 1
        await asyncio.sleep(0.01)
        if self.busy:
            self.stream.send(Notice("another message waits already"))


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("retired", [False, True])
def test_a_stream_ends_with_its_certificate(busy: bool, retired: bool) -> None:
    context, ends = Context(busy), time.time() + LEFT_S
    members: Any = SimpleNamespace(
        connect=lambda name, hello, process: context.stream, disconnect=lambda stream: None, rival=lambda *_: None
    )
    pulses = DevicePulses(2.0)
    service = FederationService(members, None, None, pulses, Turns())  # type: ignore[arg-type]
    known = Caller("device", "ada", "f", float("inf"), {"f": ends}) if retired else Caller("device", "ada", "f", ends)

    async def main() -> None:
        CALLER.set(known)
        looking = asyncio.create_task(pulses.run())
        async with aio.timeout(PATIENCE_S):
            try:
                await service.connect(object(), context)  # type: ignore[arg-type]
            finally:
                looking.cancel()

    with pytest.raises(CertificateRefused):
        aio.run(main())
    assert time.time() >= ends
    assert context.written > 5 or not busy
