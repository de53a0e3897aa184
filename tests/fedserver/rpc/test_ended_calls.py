"""A call that gRPC has ended itself, as after a message that is too large, ends without a traceback in the log."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from attune.common.errors import SettingError
from attune.common.grpc_errors import abort


class Ended:
    """Context of a call that is over."""

    async def abort(self, *_: Any) -> None:
        raise grpc.aio.InternalError("the batch failed")


async def test_an_error_that_cannot_be_answered_any_more_cancels_the_handler() -> None:
    with pytest.raises(asyncio.CancelledError):
        await abort(Ended(), SettingError("too late"))  # type: ignore[arg-type]
