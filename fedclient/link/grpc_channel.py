"""A gRPC channel of a device, which notes what is sent, and whose calls all end with one reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc
from grpc.aio import AioRpcError

from attune.common import aio
from attune.common.errors import Unreachable
from attune.common.exchange.protobuf import Call
from attune.common.grpc_errors import from_rpc
from attune.common.text import clean
from attune.fedclient.disclosure_log import DisclosureLog
from attune.fedclient.link.port import Broken

C = TypeVar("C")


class GrpcChannel:
    """gRPC channel that can end all its calls with a reason, and notes what is sent.

    Args:
        channel: The channel. It gets messages as bytes alone, so none can be sent that was not noted.
        judged: Turns a server's refusal into an error.
        log: Notes what is sent.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        judged: Callable[[AioRpcError], Exception | None] = from_rpc,
        log: DisclosureLog | None = None,
    ) -> None:
        self.channel = channel
        self._judged, self._log = judged, log
        self._cut_by = ""
        self._calls: set[Any] = set()

    def __repr__(self) -> str:
        return f"<GrpcChannel, {len(self._calls)} calls{', cut' if self._cut_by else ''}>"

    def unary(self, call: Call) -> Any:
        """Return what makes a call with one request and one reply."""
        made = self.channel.unary_unary(call.path, None, call.reply.read)
        return lambda message, timeout: made(self.written(call, message), timeout=timeout)

    def receiving(self, call: Call) -> Any:
        """Return what makes a call whose replies are a stream."""
        made = self.channel.unary_stream(call.path, None, call.reply.read)
        return lambda message: made(self.written(call, message))

    def sending(self, call: Call) -> Any:
        """Return what makes a call whose requests are a stream of bytes."""
        return self.channel.stream_unary(call.path, None, call.reply.read)

    def streams(self, call: Call) -> Any:
        """Return what makes a call with streams both ways. Its requests are bytes, as `written` returns them."""
        return self.channel.stream_stream(call.path, None, call.reply.read)

    def written(self, call: Call, message: Any) -> bytes:
        """Note a message, and return its bytes.

        Raises:
            OSError: It cannot be noted, so it must not be sent.
        """
        data = call.request.write(message)
        if self._log is not None:
            self._log.note(message, len(data))
        return data

    @contextlib.contextmanager
    def call(self, call: C) -> Iterator[C]:
        """Track a call during the block, which ends it in any case.

        Failures become AttuneErrors (what the peer named) or Broken (all others). A task that is being cancelled gets only
        CancelledError, because a link breaks and its job is cancelled in the same moment.
        """
        self._calls.add(call)
        try:
            yield call
        except (AioRpcError, TimeoutError, asyncio.CancelledError) as error:
            if aio.cancelling():
                raise asyncio.CancelledError from None
            raise self._named(error) from None
        finally:
            self._calls.discard(call)
            call.cancel()  # type: ignore[attr-defined]

    def _named(self, error: BaseException) -> Exception:
        if isinstance(error, AioRpcError):
            named = self._judged(error)
            if named is not None and not isinstance(named, Unreachable):
                return named
            unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
            return Broken(f"lost the server ({error.code().name.lower()}: {clean(error.details() or '')})", unavailable)
        if isinstance(error, TimeoutError):
            return Broken("the server has stopped answering")
        # The call was cancelled, not this task: the channel was closed.
        return Broken(self._cut_by or "the connection was given up")

    async def cut(self, reason: str) -> None:
        """End all calls, which raise Broken with this reason, and the connection."""
        self._cut_by = reason
        for call in list(self._calls):
            call.cancel()
        await self.channel.close()
