"""Every call passes here first: who is it by certificate, and may that role call this method? What is not listed is refused.

Calls about an order wait until a server that has just begun has given its orders out again.

What fails for want of something that the server lacks for the moment can be called again, and the operator is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from attune.common.errors import AttuneError, Forbidden, LedgerBusy, TokenRefused
from attune.common.grpc_errors import abort
from attune.fedserver.federation.troubles import Troubles, can_pass
from attune.fedserver.identity.registrar import Caller, Registrar
from attune.fedserver.identity.server_tls import peer_fingerprint

_FEDERATION = "/attune.v1.Federation/"
_BLOBS = "/attune.v1.Blobs/"
_HEALTH = "/grpc.health.v1.Health/"
ALLOWED = {
    "bootstrap": (_FEDERATION + "Enrol",),
    "device": (_FEDERATION + "Renew", _FEDERATION + "Connect", _FEDERATION + "Submit", _BLOBS, _HEALTH),
    "operator": ("/attune.v1.Admin/", _HEALTH, "/grpc.reflection."),
}
ABOUT_ORDERS = (_FEDERATION + "Submit", _BLOBS)

CALLER: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Who makes the call that is being handled: by certificate, never by a message."""
    return CALLER.get()


class Auth(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses before a handler sees the call. Handlers learn who calls from `caller`."""

    def __init__(self, registrar: Registrar, troubles: Troubles, ready: asyncio.Event) -> None:
        self._registrar, self._troubles, self._ready = registrar, troubles, ready

    async def check(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Errors: CertificateRefused, Forbidden, TokenRefused, LedgerBusy."""
        found = await self._registrar.caller(peer_fingerprint(context.auth_context()))
        if not method.startswith(ALLOWED[found.role]):
            if found.role == "bootstrap":
                raise TokenRefused("a join token may only enrol: call Enrol, then come back with the certificate")
            raise Forbidden(f"{found.role} {found.name} may not call {method}")
        CALLER.set(found)
        if method.startswith(ABOUT_ORDERS):
            await self._ready.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        behaviours = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
        kind = next(kind for kind in behaviours if getattr(handler, kind) is not None)
        return handler._replace(**{kind: self._wrap(method, getattr(handler, kind))})

    def _wrap(self, method: str, behaviour: Any) -> Any:
        """The same behaviour behind the check. gRPC tells generators from coroutines by inspection, so each keeps its form."""

        async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
            async with self._answering(method, context):
                await self.check(method, context)
                return await behaviour(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self._answering(method, context):
                await self.check(method, context)
                async for message in behaviour(request, context):
                    yield message

        return stream if inspect.isasyncgenfunction(behaviour) else call

    @contextlib.asynccontextmanager
    async def _answering(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Ends the call with the error that was raised inside. An OSError that can pass becomes LedgerBusy."""
        step = f"answering {method.rpartition('/')[2]}"
        try:
            yield
        except AttuneError as error:
            await abort(context, error)
        except OSError as error:
            if not can_pass(error):
                raise
            self._troubles.set(step, str(error.strerror))
            await abort(context, LedgerBusy(f"the server cannot do this now ({error.strerror}): call again"))
        else:
            self._troubles.clear(step)
