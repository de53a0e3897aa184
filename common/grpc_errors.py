"""Conversion of our errors to gRPC statuses and back: code, message, and `kind` and time in the trailing metadata."""

from __future__ import annotations

import asyncio
import time
from typing import Any, NoReturn

import grpc

from attune.common.errors import AttuneError, from_kind
from attune.common.text import clean

KIND_KEY = "attune-error"
TIME_KEY = "attune-time"  # unix time of the refusing side, in whole seconds
LONGEST_REASON = 2000  # characters of a peer's message


async def abort(context: grpc.aio.ServicerContext, error: AttuneError) -> NoReturn:
    """End a call with `error`, so that the peer can raise the same class with the same message.

    Raises:
        CancelledError: gRPC has ended the call itself meanwhile, as after a message that is too large.
    """
    details = ((KIND_KEY, error.kind), (TIME_KEY, str(int(time.time()))))
    try:
        await context.abort(grpc.StatusCode[error.status], str(error), details)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError("the call is over") from None
    raise error


def from_rpc(error: grpc.RpcError | grpc.aio.AioRpcError) -> AttuneError | None:
    """Return the error that the peer named, or None if it named none, as when the connection breaks."""
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == KIND_KEY:
            return from_kind(str(value), clean(error.details() or "", LONGEST_REASON))
    return None


def time_of(error: grpc.aio.AioRpcError) -> float | None:
    """Return the unix time at which the peer refused, by its clock; None if it did not say."""
    trailing: Any = error.trailing_metadata() or ()
    said = next((str(value) for key, value in trailing if key == TIME_KEY), "")
    return float(said) if said.isascii() and said.isdigit() and len(said) < 12 else None
