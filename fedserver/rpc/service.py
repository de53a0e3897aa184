"""Enrolment, the control stream and the receipt over gRPC: messages in, coordinator and updates called, messages out."""

from __future__ import annotations

import asyncio

import grpc

from attune.common import aio
from attune.common.errors import AttuneError, SettingError, Unreachable
from attune.common.pb import federation_pb2 as pb
from attune.common.pb import federation_pb2_grpc
from attune.common.protocol import PROTOCOL
from attune.common.pulse import Pulse
from attune.common.text import clean
from attune.fedserver.federation.members import Members
from attune.fedserver.federation.streams import Stream
from attune.fedserver.federation.updates import Updates
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.rpc.auth import caller
from attune.fedserver.rpc.messages import encode, profile_of, update_of
from attune.fedserver.rpc.pulses import Pulses

HELLO_TIMEOUT_S = 30.0
LONGEST_SOFTWARE = 40  # characters


class FederationService(federation_pb2_grpc.FederationServicer):
    def __init__(self, members: Members, updates: Updates, registrar: Registrar, pulses: Pulses) -> None:
        self._members, self._updates, self._registrar, self._pulses = members, updates, registrar, pulses

    async def Enrol(self, request: pb.EnrolRequest, context: grpc.aio.ServicerContext) -> pb.Certificate:  # noqa: N802
        pem = await self._registrar.enrol(caller().fingerprint, request.name, request.csr_der)
        return self._certificate(pem, request.name)

    async def Renew(self, request: pb.RenewRequest, context: grpc.aio.ServicerContext) -> pb.Certificate:  # noqa: N802
        name = caller().name
        return self._certificate(await self._registrar.renew(name, request.csr_der), name)

    def _certificate(self, pem: bytes, name: str) -> pb.Certificate:
        return pb.Certificate(certificate_pem=pem, ca_pem=self._registrar.authority.certificate_pem, name=name)

    async def Connect(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        name = caller().name
        hello = await self._hello(name, context)
        beat = pb.ServerMessage(beat=pb.Beat(every_s=self._pulses.every_s))
        await context.write(beat)
        software = clean(hello.software, LONGEST_SOFTWARE)
        stream = self._members.connect(name, profile_of(hello, name), software, hello.inline_bytes, hello.encodings)
        pulse = self._pulses.open(name)
        listening = asyncio.create_task(self._listen(stream, pulse, context))
        try:
            while True:
                try:
                    async with aio.timeout(self._pulses.every_s / 2):
                        message = await stream.next()
                except TimeoutError:
                    caller().check_time()
                    await context.write(beat)
                    continue
                if message is None:
                    return
                await context.write(encode(message))
        finally:
            listening.cancel()
            self._pulses.close(name, pulse)
            self._members.disconnect(stream)

    async def _hello(self, name: str, context: grpc.aio.ServicerContext) -> pb.Hello:
        try:
            async with aio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
            if first is grpc.aio.EOF or first.WhichOneof("message") != "hello":
                raise SettingError(
                    f"{name} did not begin its stream with Hello: use a fedclient that speaks protocol {PROTOCOL}"
                )
            if first.hello.protocol != PROTOCOL:
                raise SettingError(
                    f"{name} speaks protocol {first.hello.protocol}; this server speaks {PROTOCOL}: update the older side"
                )
            hello: pb.Hello = first.hello
            return hello
        except TimeoutError:
            raise SettingError(f"{name} opened a stream and said nothing for {HELLO_TIMEOUT_S:.0f} s") from None

    async def _listen(self, stream: Stream, pulse: Pulse, context: grpc.aio.ServicerContext) -> None:
        """Reads what the device says until it hangs up, or is silent for too long; either ends the stream."""
        watching: asyncio.Task[None] | None = None

        def gone() -> None:
            stream.close(Unreachable(f"nothing was heard of {stream.name} for too long: it must reconnect"))

        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                pulse.heard()
                match message.WhichOneof("message"):
                    case "trouble":
                        await self._members.trouble(stream.name, message.trouble.order_id, clean(message.trouble.reason))
                    case "progress":
                        await self._members.progress(stream.name, message.progress.order_id, message.progress.done)
                    case "beat" if watching is None:  # an older device does not beat, and is not watched
                        watching = asyncio.create_task(pulse.watch(lambda: None, gone))
        except AttuneError as error:  # a message that cannot be read
            stream.close(error)
        finally:
            if watching is not None:
                watching.cancel()
            stream.close()

    async def Submit(self, request: pb.Update, context: grpc.aio.ServicerContext) -> pb.Receipt:  # noqa: N802
        name = caller().name
        late = await self._updates.submit(name, update_of(request))
        if late:
            return pb.Receipt(status=pb.Receipt.STATUS_LATE, message=late)
        return pb.Receipt(status=pb.Receipt.STATUS_ACCEPTED)
