"""Calls of one connection reach their handlers in the order in which they came, however long the database takes for one."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from attune.common.errors import SettingError
from attune.common.grpc_errors import abort
from attune.fedserver.federation.steps import Troubles
from attune.fedserver.identity.registrar import Caller
from attune.fedserver.rpc import auth

UPLOAD, SUBMIT = "/attune.v1.Blobs/Upload", "/attune.v1.Federation/Submit"


class SlowOnce:
    """A registrar that looks up the first certificate until it is told to end, and all others at once."""

    def __init__(self) -> None:
        self.end, self._looks = asyncio.Event(), 0

    async def caller(self, fingerprint: str) -> Caller:
        self._looks += 1
        if self._looks == 1:
            await self.end.wait()
        return Caller("device", "kiel", fingerprint)


async def test_an_update_does_not_overtake_its_upload_and_others_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "peer_fingerprint", lambda shown: "ab")
    ready, registrar, answered = asyncio.Event(), SlowOnce(), list[str]()
    ready.set()
    limiter = cast(Any, SimpleNamespace(came=lambda peer, fingerprint: None, accepted=contextlib.nullcontext))
    checked = auth.Auth(cast(Any, registrar), Troubles(), cast(Any, None), limiter, ready)

    def call(method: str, peer: str) -> asyncio.Task[Any]:
        async def answer(request: object, context: object) -> None:
            assert auth.caller().name == "kiel"
            answered.append(f"{method} of {peer}")

        context = SimpleNamespace(peer=lambda: f"ipv4:127.0.0.1:{peer}", auth_context=dict)
        return asyncio.create_task(checked._wrap(method, answer, None)(None, context))

    slow = [call(UPLOAD, "1"), call(SUBMIT, "1")]
    await call(SUBMIT, "2")
    await asyncio.sleep(0.05)
    assert answered == [f"{SUBMIT} of 2"]
    registrar.end.set()
    await asyncio.gather(*slow)
    assert answered[1:] == [f"{UPLOAD} of 1", f"{SUBMIT} of 1"]


# --- a call that gRPC has ended itself, as after a message that is too large, ends without a traceback in the log


class Ended:
    """Context of a call that is over."""

    async def abort(self, *_: Any) -> None:
        raise grpc.aio.InternalError("the batch failed")


async def test_an_error_that_cannot_be_answered_any_more_cancels_the_handler() -> None:
    with pytest.raises(asyncio.CancelledError):
        await abort(Ended(), SettingError("too late"))  # type: ignore[arg-type]
