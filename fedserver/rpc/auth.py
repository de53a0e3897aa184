"""Every call passes here first: who is it by certificate, and may that role call this method? What is not listed is refused.

Nothing of a message is read before that. What fails for want of something that the server lacks for the moment can be called
again, and the operator is told; so is who was refused, and why. A caller hears nothing of the server's files. Calls about an
order wait until a server that has just begun has given its orders out again.
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

import grpc
from google.protobuf.message import DecodeError

from attune.common.errors import AttuneError, Forbidden, LedgerBusy, TokenRefused, TooMany, WireError
from attune.common.grpc_errors import abort
from attune.common.text import clean
from attune.fedserver.core.advice import for_devices
from attune.fedserver.federation.refusals import Refusals
from attune.fedserver.federation.troubles import Troubles, can_pass
from attune.fedserver.identity.registrar import Caller, Registrar
from attune.fedserver.identity.server_tls import peer_fingerprint
from attune.fedserver.rpc.connection_limiter import ConnectionLimiter, address_of

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
CALLS_A_CALLER = 32  # at one time; a device needs its stream, a transfer a part and a receipt
BEHAVIOURS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")

CALLER: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Who makes the call that is being handled: by certificate, never by a message."""
    return CALLER.get()


class Auth(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses before a handler sees the call, and before its message is read. Handlers learn who calls from `caller`."""

    def __init__(
        self, registrar: Registrar, troubles: Troubles, refusals: Refusals, connections: ConnectionLimiter, ready: asyncio.Event
    ) -> None:
        self._registrar, self._troubles, self._refusals, self._connections = registrar, troubles, refusals, connections
        self._ready = ready
        self._calls: Counter[str] = Counter()  # by fingerprint (of a token by connection), at this moment

    async def check(self, method: str, context: grpc.aio.ServicerContext) -> Caller:
        """Errors: CertificateRefused, Forbidden, TokenRefused, LedgerBusy."""
        fingerprint = peer_fingerprint(context.auth_context())
        found: Caller | None = None
        try:
            found = await self._registrar.caller(fingerprint)
        finally:
            self._connections.came(context.peer(), "" if _by_token(found) else fingerprint)
        if not method.startswith(ALLOWED[found.role]):
            if found.role == "bootstrap":
                raise TokenRefused("a join token may only enrol: call Enrol, then come back with the certificate")
            raise Forbidden(f"{found.role} {found.name} may not call {method}")
        CALLER.set(found)
        return found

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """A message of a unary call stays bytes until the caller may call; one of a stream is read by its handler only."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        kind = next(kind for kind in BEHAVIOURS if getattr(handler, kind) is not None)
        read = functools.partial(_read, method, handler.request_deserializer)
        wrapped = self._wrap(method, getattr(handler, kind), None if handler.request_streaming else read)
        return handler._replace(**{kind: wrapped, "request_deserializer": read if handler.request_streaming else None})

    def _wrap(self, method: str, behaviour: Any, read: Callable[[bytes], Any] | None) -> Any:
        """The same behaviour behind the check. gRPC tells generators from coroutines by inspection, so each keeps its form."""

        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._answering(method, context) as answering:
                with self._counted(await self.check(method, context), context):
                    await self._orders_out(method)
                    return await behaviour(answering.takes(request, read), context)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self._answering(method, context) as answering:
                with self._counted(await self.check(method, context), context):
                    await self._orders_out(method)
                    async for message in behaviour(answering.takes(request, read), context):
                        yield message

        return stream if inspect.isasyncgenfunction(behaviour) else call

    async def _orders_out(self, method: str) -> None:
        if method.startswith(ABOUT_ORDERS):
            await self._ready.wait()

    @contextlib.contextmanager
    def _counted(self, found: Caller, context: grpc.aio.ServicerContext) -> Iterator[None]:
        """Errors: TooMany."""
        who = context.peer() if _by_token(found) else found.fingerprint
        if self._calls[who] >= CALLS_A_CALLER:
            raise TooMany(
                f"{found.name or 'the holder of this token'} makes {CALLS_A_CALLER} calls already: wait for an answer"
            )
        self._calls[who] += 1
        try:
            yield
        finally:
            self._calls[who] -= 1
            if not self._calls[who]:
                del self._calls[who]

    @contextlib.asynccontextmanager
    async def _answering(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[_Answering]:
        """Ends the call with the error that was raised inside. An OSError that can pass becomes LedgerBusy."""
        step = f"answering {method.rpartition('/')[2]}"
        answering = _Answering(context.peer())
        try:
            yield answering
        except AttuneError as error:
            self._refusals.note(error, *answering.who())
            await abort(context, for_devices(error))
        except OSError as error:
            if not can_pass(error):
                await self._failed(step, error, answering, context)
            self._troubles.set(step, str(error.strerror))
            await abort(context, LedgerBusy(f"the server cannot do this now ({error.strerror}): call again"))
        except Exception as error:
            await self._failed(step, error, answering, context)
        else:
            self._troubles.clear(step)

    async def _failed(self, step: str, error: Exception, answering: _Answering, context: grpc.aio.ServicerContext) -> None:
        """What nobody has foreseen: all of it for the operator, and for the caller that it happened."""
        LOG.error("%s: %s", step, error, exc_info=error)
        self._refusals.tell(AttuneError.kind, f"{step} failed: {type(error).__name__}: {error}", *answering.who())
        await abort(context, AttuneError(f"{step} failed on the server; its log says why"))


class _Answering:
    """One call: where it comes from, and who it says to be where no certificate says it yet."""

    def __init__(self, peer: str) -> None:
        self._peer, self._claimed = peer, ""

    def takes(self, request: Any, read: Callable[[bytes], Any] | None) -> Any:
        """The request as a message. Errors: WireError."""
        if read is None:
            return request
        message = read(request)
        self._claimed = clean(str(getattr(message, "name", "")), 64)
        return message

    def who(self) -> tuple[str, str]:
        """For the operator's eyes; and the device's name, if it is one."""
        found, address = CALLER.get(None), address_of(self._peer)[0]
        if found is not None and found.role == "device":
            return found.name, found.name
        if found is not None and found.role == "operator":
            return "the operator", ""
        return f"{self._claimed or 'somebody'} from {address}", ""


def _by_token(found: Caller | None) -> bool:
    """Many devices may share a token, so it is not one caller."""
    return found is not None and found.role == "bootstrap"


def _read(method: str, deserialize: Callable[[bytes], Any] | None, message: bytes) -> Any:
    """Errors: WireError, in one line."""
    if deserialize is None:
        return message
    try:
        return deserialize(message)
    except DecodeError:
        raise WireError(f"a message of {len(message)} bytes for {method} cannot be read: update the older side") from None
