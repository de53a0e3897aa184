"""Federation service over gRPC: enrolment, the control stream with its signs of life, and the receipt of updates."""

from __future__ import annotations

import asyncio

import grpc

from attune.common import aio
from attune.common.errors import AttuneError, SettingError
from attune.common.exchange.messages import (
    Beat,
    Description,
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
from attune.fedserver.federation.members import Members
from attune.fedserver.federation.steps import Turns
from attune.fedserver.federation.streams import Stream
from attune.fedserver.federation.survey import Survey
from attune.fedserver.federation.updates import Updates
from attune.fedserver.identity.registrar import Registrar
from attune.fedserver.rpc.auth import caller
from attune.fedserver.rpc.connection_limiter import address_of
from attune.fedserver.rpc.pulses import DevicePulses, WatchedStream

HELLO_TIMEOUT_S = 30.0
LONGEST_PROCESS = 64  # characters
SILENT_PACES = 3  # after so long a silence, a stream is over that is not watched


class FederationService:
    """Handlers of the calls Enrol, Renew, Connect and Submit."""

    def __init__(
        self, members: Members, updates: Updates, registrar: Registrar, pulses: DevicePulses, survey: Survey, turns: Turns
    ) -> None:
        self._members, self._updates, self._registrar, self._pulses = members, updates, registrar, pulses
        self._survey, self._turns = survey, turns

    def handler(self) -> grpc.GenericRpcHandler:
        unary = {ENROL: self.enrol, RENEW: self.renew, SUBMIT: self.submit}
        handlers = {
            call.name: grpc.unary_unary_rpc_method_handler(behaviour, call.request.read, call.reply.write)
            for call, behaviour in unary.items()
        }
        connect = grpc.stream_stream_rpc_method_handler(self.connect, CONNECT.request.read, CONNECT.reply.write)
        return grpc.method_handlers_generic_handler(FEDERATION, handlers | {CONNECT.name: connect})

    async def enrol(self, request: EnrolRequest, context: grpc.aio.ServicerContext) -> IssuedCertificate:
        """Issue a device's first certificate. The work goes on if the device vanishes, because the log has it already."""
        return await self._turns.carry(self._enrol(caller().fingerprint, request))

    async def _enrol(self, fingerprint: str, request: EnrolRequest) -> IssuedCertificate:
        pem = await self._registrar.enrol(fingerprint, request.name, request.csr_der)
        self._members.readmit(request.name)
        return self._certificate(pem, request.name)

    async def renew(self, csr_der: bytes, context: grpc.aio.ServicerContext) -> IssuedCertificate:
        name = caller().name
        return self._certificate(await self._turns.carry(self._registrar.renew(name, csr_der)), name)

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
        del hello  # else it would stay as long as the stream
        who = caller()
        watched = self._pulses.open(stream, beat.every_s, lambda: who.left_s)
        listening = asyncio.create_task(self._listen(watched, context))
        try:
            while (message := await stream.next()) is not None:
                who.check_time()
                await context.write(message)
        finally:
            listening.cancel()
            self._pulses.close(watched)
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

    async def _listen(self, watched: WatchedStream, context: grpc.aio.ServicerContext) -> None:
        """Read what the device says until it hangs up, which ends the stream."""
        stream, pulse = watched.stream, watched.pulse
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
                    case Description():
                        self._members.described(stream.name, message)
                    case Progress(order_id, done):
                        await self._members.progress(stream.name, order_id, done)
                    case Beat():
                        watched.heard(message)
        except AttuneError as error:  # a message that cannot be read
            stream.close(error)
        finally:
            stream.close()

    async def submit(self, update: Update, context: grpc.aio.ServicerContext) -> Receipt:
        return await self._updates.submit(caller().name, update)
