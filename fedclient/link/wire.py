"""One gRPC channel and what is under way on it: failures by name, and all of it cut at once when the channel is given up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import grpc
from grpc.aio import AioRpcError

from attune.common import aio
from attune.common.errors import Unreachable
from attune.common.exchange.protobuf import Call
from attune.common.grpc_errors import from_rpc
from attune.common.text import clean
from attune.fedclient.link.port import Broken

C = TypeVar("C")


class Wire:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._cut_by = ""
        self._calls: set[Any] = set()

    def __repr__(self) -> str:
        return f"<Wire, {len(self._calls)} calls{', cut' if self._cut_by else ''}>"

    def unary(self, call: Call) -> Any:
        """Return what makes a call with one request and one reply."""
        return self.channel.unary_unary(call.path, call.request.write, call.reply.read)

    def receiving(self, call: Call) -> Any:
        """Return what makes a call whose replies are a stream."""
        return self.channel.unary_stream(call.path, call.request.write, call.reply.read)

    def sending(self, call: Call) -> Any:
        """Return what makes a call whose requests are a stream."""
        return self.channel.stream_unary(call.path, call.request.write, call.reply.read)

    def streams(self, call: Call) -> Any:
        """Return what makes a call with streams both ways."""
        return self.channel.stream_stream(call.path, call.request.write, call.reply.read)

    @contextlib.contextmanager
    def call(self, call: C) -> Iterator[C]:
        """The call inside, which ends with the block, however that ends.

        Its failures become AttuneErrors (what the peer named) or Broken (everything else). A task that is being cancelled
        hears of nothing but that: the link that breaks and the job that is cancelled for it come in the same moment.
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
            named = from_rpc(error)
            if named is not None and not isinstance(named, Unreachable):
                return named
            unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
            return Broken(f"lost the server ({error.code().name.lower()}: {clean(error.details() or '')})", unavailable)
        if isinstance(error, TimeoutError):
            return Broken("the server has stopped answering")
        # Nobody cancelled this task, so its call was: when the channel was given up.
        return Broken(self._cut_by or "the connection was given up")

    async def cut(self, reason: str) -> None:
        """Ends all calls, which are Broken for this reason, and the connection."""
        self._cut_by = reason
        for call in list(self._calls):
            call.cancel()
        await self.channel.close()
