"""Authorisation of every call: the caller's certificate decides its role, and the role decides which methods it may call.

A method that is not listed is refused. No message is read before the check. If the server lacks something for the moment, the
caller may call again, and the operator is told. The operator also sees who was refused and why. Errors name no file of the
server to a caller. Calls about an order wait until a restarted server has sent its orders again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from attune.common import aio
from attune.common.errors import AttuneError, Forbidden, LedgerBusy, Stalled, TokenRefused, TooMany, WireError
from attune.common.grpc_errors import abort
from attune.common.text import clean
from attune.fedserver.core.advice import for_devices
from attune.fedserver.federation.refusals import Refusals
from attune.fedserver.federation.steps import Troubles
from attune.fedserver.identity.registrar import Caller, Registrar
from attune.fedserver.identity.server_tls import peer_fingerprint
from attune.fedserver.rpc.connection_limiter import ConnectionLimiter, address_of
from attune.fedserver.rpc.unread_bytes import Peer

LOG = logging.getLogger("fedserver")
_FEDERATION = "/attune.v1.Federation/"
_BLOBS = "/attune.v1.Blobs/"
_HEALTH = "/grpc.health.v1.Health/"
ALLOWED = {
    "bootstrap": (_FEDERATION + "Enrol",),
    "device": (_FEDERATION + "Renew", _FEDERATION + "Connect", _FEDERATION + "Submit", _BLOBS, _HEALTH),
    "operator": ("/attune.v1.Admin/", _HEALTH, "/grpc.reflection."),
}
ABOUT_ORDERS = (_FEDERATION + "Submit", _BLOBS)
STALLED_S = 60.0  # for which a peer may take no message
CALLS_A_CALLER = 32  # at one time; a device needs its stream, a transfer a part and a receipt
BEHAVIOURS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

CALLER: ContextVar[Caller] = ContextVar("caller")
ADDRESS: ContextVar[Peer] = ContextVar("address")


def caller() -> Caller:
    """Return the caller of the call that is being handled, by its certificate."""
    return CALLER.get()


class Auth(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that refuses calls before a handler sees them and before their message is read."""

    def __init__(
        self, registrar: Registrar, troubles: Troubles, refusals: Refusals, connections: ConnectionLimiter, ready: asyncio.Event
    ) -> None:
        self._registrar, self._troubles, self._refusals, self._connections = registrar, troubles, refusals, connections
        self._ready = ready
        self._calls: Counter[str] = Counter()  # calls under way, by fingerprint; those with a token by connection
        self._checks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by connection, while calls are checked

    async def check(self, method: str, context: grpc.aio.ServicerContext) -> Caller:
        """Return the caller if it may call the method.

        The calls of one connection are checked in the order in which they came: an update must not overtake its upload.

        Raises:
            CertificateRefused: The certificate is not one of a caller.
            Forbidden: The caller's role may not call the method.
            TokenRefused: A join token may only enrol.
            LedgerBusy: The database cannot be read now.
        """
        fingerprint = peer_fingerprint(context.auth_context())
        known: Caller | None = None
        try:
            async with self._checks.setdefault(context.peer(), asyncio.Lock()):
                known = await self._registrar.caller(fingerprint)
        finally:
            self._connections.came(context.peer(), "" if _by_token(known) else fingerprint)
        if not method.startswith(ALLOWED[known.role]):
            if known.role == "bootstrap":
                raise TokenRefused("a join token may only enrol: call Enrol, then come back with the certificate")
            raise Forbidden(f"{known.role} {known.name} may not call {method}")
        CALLER.set(known)
        ADDRESS.set(address_of(context.peer()))
        return known

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the handler.

        The message of a unary call stays bytes until the caller is checked. A stream is read by its handler only.
        """
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        kind = next(kind for kind in BEHAVIOURS if getattr(handler, kind) is not None)
        read = functools.partial(self._read, method, handler.request_deserializer)
        wrapped = self._wrap(method, getattr(handler, kind), None if handler.request_streaming else read)
        return handler._replace(**{kind: wrapped, "request_deserializer": read if handler.request_streaming else None})

    def _read(self, method: str, deserialize: Callable[[bytes], Any] | None, message: bytes) -> Any:
        """Return the message in these bytes.

        Raises:
            WireError: They cannot be read.
        """
        self._connections.note_read(ADDRESS.get(), len(message))
        if deserialize is None:
            return message
        try:
            return deserialize(message)
        except DecodeError:
            raise WireError(f"a message of {len(message)} bytes for {method} cannot be read: update the older side") from None

    def _wrap(self, method: str, behaviour: Any, read: Callable[[bytes], Any] | None) -> Any:
        """Return the behaviour behind the check.

        Messages of a generator are written here, so that no peer holds one up for ever.
        """

        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._answering(method, context) as answering:
                with self._counted(await self.check(method, context), context):
                    await self._orders_out(method)
                    timed = TimedContext(context, self._connections)
                    answer = behaviour(answering.takes(request, read), timed)
                    if not inspect.isasyncgen(answer):
                        return await answer
                    async for message in answer:
                        await timed.write(message)
                    return None

        return call

    async def _orders_out(self, method: str) -> None:
        if method.startswith(ABOUT_ORDERS):
            await self._ready.wait()

    @contextlib.contextmanager
    def _counted(self, known: Caller, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Count the call during the block.

        Raises:
            TooMany: The caller makes too many calls at once.
        """
        who = context.peer() if _by_token(known) else known.fingerprint
        if self._calls[who] >= CALLS_A_CALLER:
            raise TooMany(
                f"{known.name or 'the holder of this token'} makes {CALLS_A_CALLER} calls already: wait for an answer"
            )
        accepted = contextlib.nullcontext() if _by_token(known) else self._connections.accepted(context.peer())
        self._calls[who] += 1
        try:
            with accepted:
                yield
        finally:
            self._calls[who] -= 1
            if not self._calls[who]:
                del self._calls[who]

    @contextlib.asynccontextmanager
    async def _answering(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[_Answering]:
        """End the call with the error that was raised inside. An OSError that makes the disk unusable becomes LedgerBusy."""
        step = f"answering {method.rpartition('/')[2]}"
        answering = _Answering(context.peer())
        try:
            yield answering
        except AttuneError as error:
            self._troubles.met(error)
            self._refusals.note(error, *answering.who())
            await abort(context, for_devices(error))
        except OSError as error:
            if not self._troubles.met(error):
                await self._failed(step, error, answering, context)
            why = f"the server cannot do this now ({error.strerror}): its operator is told; this device tries again"
            await abort(context, LedgerBusy(why))
        except grpc.aio.InternalError:
            raise asyncio.CancelledError("the call is over") from None  # gRPC has ended it: nothing can be answered
        except Exception as error:
            await self._failed(step, error, answering, context)

    async def _failed(self, step: str, error: Exception, answering: _Answering, context: grpc.aio.ServicerContext) -> None:
        """Report an unexpected error: all details to the operator, and to the caller only that it happened."""
        LOG.error("%s: %s", step, error, exc_info=error)
        self._refusals.tell(AttuneError.kind, f"{step} failed: {type(error).__name__}: {error}", *answering.who())
        await abort(context, AttuneError(f"{step} failed on the server; its log says why"))


class TimedContext:
    """Context of a call that ends if its peer takes no message: a window of 0 would hold it, also a revoked device's."""

    def __init__(self, context: grpc.aio.ServicerContext, connections: ConnectionLimiter) -> None:
        self._context, self._connections = context, connections

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        """Write a message.

        Raises:
            Stalled: The peer did not take it in time. Its connection is cut.
        """
        try:
            async with aio.timeout(STALLED_S):
                await self._context.write(message)
        except TimeoutError:
            self._connections.cut(self._context.peer())
            raise Stalled(f"it took nothing for {STALLED_S:.0f} s, and its connection was cut") from None


class _Answering:
    """One call: its address, and the name that it claims if its certificate gives none."""

    def __init__(self, peer: str) -> None:
        self._peer, self._claimed = peer, ""

    def takes(self, request: Any, read: Callable[[bytes], Any] | None) -> Any:
        """Return the request as a message.

        Raises:
            WireError: It cannot be read.
        """
        if read is None:
            return request
        message = read(request)
        self._claimed = clean(str(getattr(message, "name", "")), 64)
        return message

    def who(self) -> tuple[str, str]:
        """Return the caller for the operator, and its name if it is a device."""
        known, address = CALLER.get(None), address_of(self._peer)[0]
        if known is not None and known.role == "device":
            return known.name, known.name
        if known is not None and known.role == "operator":
            return "the operator", ""
        return f"{self._claimed or 'somebody'} from {address}", ""


def _by_token(known: Caller | None) -> bool:
    """Return whether the caller shows a join token. Many devices may share a token, so it is not one caller."""
    return known is not None and known.role == "bootstrap"
