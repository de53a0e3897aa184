"""Federation service over gRPC: enrolment, the control stream with its signs of life, and the receipt of updates."""

from __future__ import annotations

import asyncio

import grpc

from attune.common import aio
from attune.common.errors import AttuneError, SettingError, Unreachable
from attune.common.exchange.messages import (
    Beat,
    EnrolRequest,
    Hello,
    IssuedCertificate,
    Progress,
    Receipt,
    SecureMessage,
    StatisticsReport,
    Trouble,
    UnitReport,
    Update,
)
from attune.common.exchange.protobuf import CONNECT, ENROL, FEDERATION, RENEW, SUBMIT
from attune.common.protocol import PROCESS_KEY, PROTOCOL
from attune.common.pulse import Pulse
from attune.fedserver.federation.members import Members
from attune.fedserver.federation.streams import Stream
from attune.fedserver.federation.survey import Survey
from attune.fedserver.federation.updates import Updates
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.rpc.auth import caller
from attune.fedserver.rpc.connection_limiter import address_of


class DevicePulses:
    """Pulse of each device's newest stream. `every_s` is the pace of a small fleet (server.keepalive_s).

    A stream keeps the pace with which it was opened. The pace of new streams grows with the number of open ones, so that the
    beats of idle devices stay cheap: they are a few hundred a second with 10,000 devices.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._of: dict[str, Pulse] = {}

    def pace(self, name: str) -> float:
        """Return the pace of a stream that this device opens now, in seconds."""
        others = len(self._of) - (name in self._of)
        return max(self.every_s, min(others * A_DEVICE_S, SLOWEST_S))

    def open(self, name: str, every_s: float) -> Pulse:
        """Return the pulse of a new stream. Transfers show life on it from now on."""
        pulse = self._of[name] = Pulse()
        pulse.set_pace(every_s)
        return pulse

    def close(self, name: str, pulse: Pulse) -> None:
        """Drop the pulse of a stream that ended. A newer stream's pulse stays."""
        if self._of.get(name) is pulse:
            del self._of[name]

    def of(self, name: str) -> Pulse:
        """Return the pulse of a device; without a stream, one that is not watched."""
        return self._of.get(name) or Pulse()


A_DEVICE_S = 0.01  # seconds by which each open stream makes the pace of the next one slower
SLOWEST_S = 60.0  # that the pace may become so
HELLO_TIMEOUT_S = 30.0
LONGEST_PROCESS = 64  # characters
SILENT_PACES = 3  # after so long a silence, a stream is over that is not watched


class FederationService:
    """Handlers of the calls Enrol, Renew, Connect and Submit."""

    def __init__(self, members: Members, updates: Updates, registrar: Registrar, pulses: DevicePulses, survey: Survey) -> None:
        self._members, self._updates, self._registrar, self._pulses = members, updates, registrar, pulses
        self._survey = survey

    def handler(self) -> grpc.GenericRpcHandler:
        unary = {ENROL: self.enrol, RENEW: self.renew, SUBMIT: self.submit}
        handlers = {
            call.name: grpc.unary_unary_rpc_method_handler(behaviour, call.request.read, call.reply.write)
            for call, behaviour in unary.items()
        }
        connect = grpc.stream_stream_rpc_method_handler(self.connect, CONNECT.request.read, CONNECT.reply.write)
        return grpc.method_handlers_generic_handler(FEDERATION, handlers | {CONNECT.name: connect})

    async def enrol(self, request: EnrolRequest, context: grpc.aio.ServicerContext) -> IssuedCertificate:
        pem = await self._registrar.enrol(caller().fingerprint, request.name, request.csr_der)
        self._members.readmit(request.name)
        return self._certificate(pem, request.name)

    async def renew(self, csr_der: bytes, context: grpc.aio.ServicerContext) -> IssuedCertificate:
        name = caller().name
        return self._certificate(await self._registrar.renew(name, csr_der), name)

    def _certificate(self, pem: bytes, name: str) -> IssuedCertificate:
        return IssuedCertificate(pem, self._registrar.authority.certificate_pem, name)

    async def connect(self, request_iterator: object, context: grpc.aio.ServicerContext) -> None:
        name = caller().name
        hello = await self._hello(name, context)
        beat = Beat(self._pulses.pace(name))
        await context.write(beat)
        process = dict(context.invocation_metadata() or ()).get(PROCESS_KEY, "")[:LONGEST_PROCESS]
        if (rival := self._members.rival(name, process)) is not None:
            await self._outlive(rival, beat, context)
        stream = self._members.connect(name, hello, process)
        pulse = self._pulses.open(name, beat.every_s)
        listening = asyncio.create_task(self._listen(stream, pulse, context))
        try:
            while True:
                caller().check_time()  # on a busy stream, too
                try:
                    async with aio.timeout(min(beat.every_s / 2, max(0.0, caller().left_s))):
                        message = await stream.next()
                except TimeoutError:
                    await context.write(beat)
                    continue
                if message is None:
                    return
                await context.write(message)
        finally:
            listening.cancel()
            self._pulses.close(name, pulse)
            self._members.disconnect(stream)

    async def _outlive(self, rival: Stream, beat: Beat, context: grpc.aio.ServicerContext) -> None:
        """Wait until the stream of another process with this identity ends: it may be what a crashed machine has left open.

        Raises:
            Replaced: The other process has shown life meanwhile, so this one, which came later, must end.
        """
        pulse = self._pulses.of(rival.name)
        signs, waited_s, step_s = pulse.signs, 0.0, beat.every_s / 8
        while self._members.is_current(rival) and waited_s < SILENT_PACES * max(beat.every_s, pulse.every_s):
            await asyncio.sleep(step_s)
            waited_s += step_s
            if pulse.signs > signs:
                raise self._members.turned_away(rival.name, address_of(context.peer())[0])
            await context.write(beat)

    async def _hello(self, name: str, context: grpc.aio.ServicerContext) -> Hello:
        try:
            async with aio.timeout(HELLO_TIMEOUT_S):
                first = await context.read()
            if not isinstance(first, Hello):
                raise SettingError(
                    f"{name} did not begin its stream with Hello: use a fedclient that speaks protocol {PROTOCOL}"
                )
            if first.protocol != PROTOCOL:
                raise SettingError(
                    f"{name} speaks protocol {first.protocol}; this server speaks {PROTOCOL}: update the older side"
                )
            return first
        except TimeoutError:
            raise SettingError(f"{name} opened a stream and said nothing for {HELLO_TIMEOUT_S:.0f} s") from None

    async def _listen(self, stream: Stream, pulse: Pulse, context: grpc.aio.ServicerContext) -> None:
        """Read what the device says until it hangs up or is silent for too long. Either ends the stream."""
        watching: asyncio.Task[None] | None = None

        def gone() -> None:
            stream.close(Unreachable(f"nothing was heard of {stream.name} for too long: it must reconnect"))

        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                pulse.heard()
                match message:
                    case Trouble(order_id, reason):
                        await self._members.trouble(stream.name, order_id, reason)
                    case SecureMessage():
                        self._members.secure(stream.name, message)
                    case StatisticsReport():
                        self._survey.answered(stream.name, message)
                    case UnitReport(verdicts):
                        await self._members.units(stream.name, verdicts)
                    case Progress(order_id, done):
                        await self._members.progress(stream.name, order_id, done)
                    case Beat() if watching is None:  # an older device does not beat, and is not watched
                        watching = asyncio.create_task(pulse.watch(lambda: None, gone))
        except AttuneError as error:  # a message that cannot be read
            stream.close(error)
        finally:
            if watching is not None:
                watching.cancel()
            stream.close()

    async def submit(self, update: Update, context: grpc.aio.ServicerContext) -> Receipt:
        return await self._updates.submit(caller().name, update)
