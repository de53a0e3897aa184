"""The link over the network: one control stream, bulk transfers that resume, receipts; all on one connection."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, NoReturn

import grpc
from grpc.aio import AioRpcError

from attune.common import aio
from attune.common.errors import AttuneError, CertificateRefused, FingerprintMismatch, Unreachable
from attune.common.exchange.messages import (
    Answer,
    Beat,
    DownloadRequest,
    Hello,
    IssuedCertificate,
    Progress,
    Receipt,
    ToServer,
    Trouble,
    Update,
    UploadTarget,
    Welcome,
)
from attune.common.exchange.protobuf import (
    CONNECT,
    DOWNLOAD,
    RENEW,
    SUBMIT,
    TARGET,
    UPLOAD,
    UPLOAD_OFFSET,
)
from attune.common.grpc_errors import from_rpc, time_of
from attune.common.identity.client_tls import channel_credentials, channel_options
from attune.common.identity.credential import Credential, csr_der, is_valid_at, needs_renewal, new_key
from attune.common.protocol import PROCESS_KEY, UPLOAD_KEY
from attune.common.pulse import Pulse
from attune.fedclient.address import ServerAddress
from attune.fedclient.disclosure_log import DisclosureLog
from attune.fedclient.home import Identity
from attune.fedclient.link.diagnose import diagnose
from attune.fedclient.link.enrol import DIAGNOSIS_S, GrpcChannel, check_issued, check_usable
from attune.fedclient.link.port import Broken, Handle
from attune.fedclient.messages import StreamOpened
from attune.fedclient.resource_limits import Allowance

OUTBOX = 16  # messages that may wait for the stream; progress beyond that is dropped
CONNECT_MS = 5000  # for a connection and its handshake
FIRST_WORD_S = 30.0  # from opening the stream to the first message on it
RENEWAL_REST_S = 900.0  # after a renewed certificate that could not be kept; the server counts what it issues
LAST_WORD_S = 5.0  # for the server to read the last message


class GrpcLink:
    """One device's connection.

    Args:
        address: The server.
        identity: The device.
        keep: Stores a renewed identity.
        allowance: Bound on the rate of bytes.
        stall_s: How long a transfer may make no progress.
        log: Notes what is sent.
        process: A word that tells this program from others with the same identity; empty: a new one.
    """

    def __init__(
        self,
        address: ServerAddress,
        identity: Identity,
        keep: Callable[[Identity], None],
        allowance: Allowance | None = None,
        stall_s: float = 60.0,
        log: DisclosureLog | None = None,
        process: str = "",
    ) -> None:
        self.address, self.identity, self.stall_s, self._log = address, identity, stall_s, log
        self._keep, self._allowance = keep, allowance or Allowance(0.0)
        self.open = asyncio.Event()
        self.inline_bytes, self.waits, self.renews = 0, False, True
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue(OUTBOX)
        self._over = asyncio.Event()  # the present stream is gone
        self._pulse = Pulse()
        self._tasks: set[asyncio.Task[None]] = set()
        self._process = process or secrets.token_hex(8)
        self._no_renewal_before = 0.0  # on the monotonic clock
        self._wire = self._new_wire()

    @property
    def name(self) -> str:
        return self.identity.name

    # --- the channel

    def _new_wire(self) -> GrpcChannel:
        connecting = ("grpc.min_reconnect_backoff_ms", CONNECT_MS)  # also limits one attempt to connect
        options = [*channel_options(self.identity.ca_pem, self.address.proxy_url), connecting]
        credentials = channel_credentials(self.identity.ca_pem, self.identity.credential)
        return GrpcChannel(grpc.aio.secure_channel(self.address.target, credentials, options), self.judged, self._log)

    def judged(self, error: AioRpcError) -> Exception | None:
        """Return the error that the server named; None if it named none.

        A refusal of a certificate that is valid by this device's clock, and not by the server's, is Broken: clocks can be set.
        """
        named, said = from_rpc(error), time_of(error)
        if not isinstance(named, CertificateRefused) or said is None:
            return named
        pem, here = self.identity.credential.certificate_pem, datetime.now(timezone.utc)
        there = datetime.fromtimestamp(said, timezone.utc)
        if is_valid_at(pem, there) or not is_valid_at(pem, here):
            return named
        return Broken(
            f"the server says: {named}. Its clock shows {there:%Y-%m-%d %H:%M} UTC, and this device's {here:%Y-%m-%d %H:%M}, "
            "at which the certificate is valid: set the clock that is wrong"
        )

    async def _replace(self, reason: str) -> None:
        """Move to a new channel. Calls on the old one raise Broken and are repeated."""
        old, self._wire = self._wire, self._new_wire()
        await old.cut(reason)

    async def close(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # only signs of life are not noted then
                self._log.flush()
        await self._wire.cut("this device is ending")

    async def renew(self) -> bool:
        """Get a certificate for a new key if two thirds of the present one's life are over. The next call uses it."""
        now = datetime.now(timezone.utc)
        if not needs_renewal(self.identity.credential.certificate_pem, now) or time.monotonic() < self._no_renewal_before:
            return False
        key = new_key()
        renew = self._wire.unary(RENEW)
        with self._wire.call(renew(csr_der(key, self.identity.name), timeout=self.stall_s)) as call:
            answer: IssuedCertificate = await call
        credential = Credential(key, answer.certificate_pem)
        try:
            check_issued(credential, self.identity.ca_pem, self.identity.name)
            check_usable(credential.certificate_pem, now)
        except (CertificateRefused, FingerprintMismatch, Unreachable) as error:
            self._no_renewal_before = time.monotonic() + RENEWAL_REST_S
            raise Broken(str(error)) from None
        self.identity = Identity(self.identity.name, credential, self.identity.ca_pem)
        self._keep(self.identity)
        await self._replace("moved over to a connection under the renewed certificate")
        return True

    async def diagnosis(self) -> str:
        address, identity = self.address, self.identity
        # The old channel would retry by its own back-off, and fail the next call with an old error.
        self.address = address.next
        await self._replace("could not connect")
        anchor = identity.ca_pem
        error = await asyncio.to_thread(
            diagnose, address.host, address.port, anchor, identity.credential, DIAGNOSIS_S, proxy=address.way
        )
        if isinstance(error, Unreachable):
            return str(error)
        raise error

    # --- the control stream

    async def control(self, hello: Hello, handle: Handle) -> NoReturn:
        self._outbox, self._pulse = asyncio.Queue(OUTBOX), Pulse()
        self._over.clear()
        self.inline_bytes, self.waits = 0, False
        waiting = asyncio.get_running_loop().call_later(FIRST_WORD_S, self._gone)
        tasks: list[asyncio.Task[None]] = []
        try:
            with self._wire.call(self._wire.streams(CONNECT)(metadata=((PROCESS_KEY, self._process),))) as call:
                await call.write(self._wire.written(CONNECT, hello))
                self.open.set()
                tasks.append(asyncio.create_task(_speak(call, self._outbox)))
                await handle(StreamOpened())
                while (message := await call.read()) is not grpc.aio.EOF:
                    waiting.cancel()
                    self._pulse.heard()
                    if message is None:  # a kind of message that a newer server may send
                        continue
                    if isinstance(message, Beat):
                        if not self._pulse.paced:
                            tasks.append(self._keep_pace(message.every_s))
                        elif message.every_s != self._pulse.every_s:  # the fleet has grown or shrunk
                            self._pulse.set_pace(message.every_s)
                            self._beat()
                        continue
                    if isinstance(message, Welcome):
                        self.inline_bytes, self.waits = min(message.inline_bytes, hello.inline_bytes), message.waits
                    await handle(message)
        except Broken as broken:
            # It is gone, or cannot serve: another server may. If there was no stream, `diagnosis` moves on.
            if broken.connecting and self.open.is_set() and self.address.others:
                self.address = self.address.next
                await self._replace("moved on to the next address")
            raise
        finally:
            self.open.clear()
            self._over.set()
            waiting.cancel()
            for task in tasks:
                task.cancel()
        raise Broken("the server closed the connection")

    def _keep_pace(self, every_s: float) -> asyncio.Task[None]:
        """Send beats at the server's pace from now on, and give up a silent server."""
        self._pulse.set_pace(every_s)
        self._beat()
        return asyncio.create_task(self._pulse.watch(self._beat, self._gone))

    def _beat(self) -> None:
        """Send a beat if nothing else waits, with the pace, which accepts it."""
        if self._outbox.empty():
            self._tell(Beat(self._pulse.every_s))

    def _gone(self) -> None:
        """Give up this connection, because the server is silent."""
        self.address = self.address.next
        replacing = asyncio.create_task(self._replace("the server has stopped answering"))
        self._tasks.add(replacing)
        replacing.add_done_callback(self._tasks.discard)

    def progress(self, order_id: str, done: float) -> None:
        self._tell(Progress(order_id, done))

    def trouble(self, order_id: str, reason: str) -> None:
        self._tell(Trouble(order_id, reason))

    def answer(self, message: Answer) -> None:
        self._tell(message)

    async def decline(self, reason: str) -> None:
        """Send the last message on the stream. The server ends the stream after it has read it."""
        self._tell(Trouble("", reason))
        self._tell(None)
        with contextlib.suppress(TimeoutError):
            async with aio.timeout(LAST_WORD_S):
                await self._over.wait()

    def _tell(self, message: ToServer | Beat | None) -> None:
        if self.open.is_set() and not self._outbox.full():
            self._outbox.put_nowait(None if message is None else self._wire.written(CONNECT, message))

    # --- bulk

    async def read(self, digest: str, offset: int, take: Callable[[bytes], None]) -> None:
        download = self._wire.receiving(DOWNLOAD)
        with self._pulse.transfer(), self._wire.call(download(DownloadRequest(digest, offset))) as call:
            while True:
                async with aio.timeout(self.stall_s):
                    frame = await call.read()
                if frame is grpc.aio.EOF:
                    return
                self._pulse.heard()
                take(frame)
                await self._allowance.spend(len(frame))

    async def upload_offset(self, target: UploadTarget) -> int:
        with self._wire.call(self._wire.unary(UPLOAD_OFFSET)(target, timeout=self.stall_s)) as call:
            return int(await call)

    async def upload(self, target: UploadTarget, frames: Iterator[bytes]) -> None:
        metadata = ((UPLOAD_KEY, TARGET.write(target)),)
        if self._log is not None:
            self._log.note_part(target)
        with self._pulse.transfer(), self._wire.call(self._wire.sending(UPLOAD)(metadata=metadata)) as call:
            # If the server answers before the last frame, writing fails, and its answer says why.
            with contextlib.suppress(asyncio.InvalidStateError):
                for frame in frames:
                    if self._log is not None:
                        self._log.note_bytes(target, len(frame))
                    async with aio.timeout(self.stall_s):
                        await call.write(frame)
                    self._pulse.heard()  # the server has made room in the window, so it is alive
                    await self._allowance.spend(len(frame))
                await call.done_writing()
            async with aio.timeout(self.stall_s):
                received = await call
        if received < target.size:
            raise Broken(f"the server has {received} of {target.size} bytes")

    async def submit(self, update: Update) -> bool:
        data = self._wire.written(SUBMIT, update)
        if self._log is not None:
            await asyncio.to_thread(self._log.sync)
        submit = self._wire.channel.unary_unary(SUBMIT.path, None, SUBMIT.reply.read)
        with self._wire.call(submit(data, timeout=self.stall_s)) as call:
            receipt: Receipt | None = await call
        if receipt is None:
            raise AttuneError("the server answered an update with a receipt of no known kind")
        return not receipt.late


async def _speak(call: Any, outbox: asyncio.Queue[bytes | None]) -> None:
    """Send the messages in the outbox until the stream ends. None ends this side of the stream."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while (message := await outbox.get()) is not None:
            await call.write(message)
        await call.done_writing()
