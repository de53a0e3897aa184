"""The boundary where our errors become gRPC statuses and come back: status code, message, and `kind` in the metadata."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from attune.common.errors import AttuneError, from_kind
from attune.common.text import clean

KIND_KEY = "attune-error"
LONGEST_REASON = 2000  # characters of what a peer names as the reason


async def abort(context: grpc.aio.ServicerContext, error: AttuneError) -> NoReturn:
    """Ends a call with `error`, so that the peer can raise the same class with the same message."""
    await context.abort(grpc.StatusCode[error.status], str(error), ((KIND_KEY, error.kind),))
    raise error


def from_rpc(error: grpc.aio.AioRpcError) -> AttuneError | None:
    """The error that the peer named, or None if the peer named none (the transport failed, say)."""
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == KIND_KEY:
            return from_kind(str(value), clean(error.details() or "", LONGEST_REASON))
    return None
