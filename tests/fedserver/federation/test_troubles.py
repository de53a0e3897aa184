"""Obstacles of a server: a store that fails is said until a call of it is good, and a watch that fails is started again."""

import asyncio
import errno
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attune.common import aio
from attune.common.errors import AttuneError, DiskFull, LedgerBusy
from attune.fedserver.federation import steps
from attune.fedserver.federation.steps import Troubles, can_pass, try_stores
from attune.fedserver.identity.registrar import Caller
from attune.fedserver.rpc import auth
from attune.fedserver.stores.disk import DiskStorage


def test_a_watch_that_fails_is_started_again_and_said(monkeypatch, caplog) -> None:
    monkeypatch.setattr(steps, "FIRST_DELAY_S", 0.0)
    troubles, begun = Troubles(), list[int]()

    async def watch() -> None:
        begun.append(len(begun))
        if len(begun) < 3:
            raise ValueError("a page of S3 that nobody expected")

    aio.run(troubles.keep_up("the watch on direct transfers", watch))
    assert begun == [0, 1, 2]
    [line] = troubles.lines
    assert line == (
        "the watch on direct transfers: it failed, and was started again (ValueError: a page of S3 that nobody expected)"
    )
    assert "Traceback" in caplog.text


async def test_a_watch_ends_when_the_server_does() -> None:
    watching = asyncio.create_task(Troubles().keep_up("the watch on streams", asyncio.Event().wait))
    await asyncio.sleep(0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching


class Called:
    """Calls of devices through the authorisation of every call, and the troubles that are left by them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(auth, "peer_fingerprint", lambda shown: "ab")
        self.troubles, self.refused = Troubles(), list[str]()

    async def call(self, error: Exception | None = None) -> None:
        async def caller(fingerprint: str) -> Caller:
            return Caller("device", "kiel", fingerprint)

        async def answer(request: object, context: object) -> None:
            if error is not None:
                raise error

        async def abort(code: object, details: str, metadata: object) -> None: ...

        limiter = SimpleNamespace(came=lambda peer, fingerprint: None, accepted=lambda peer: nullcontext())
        ready = asyncio.Event()
        refusals: Any = SimpleNamespace(note=lambda error, *who: None, tell=lambda kind, text, *who: self.refused.append(text))
        checked = auth.Auth(cast(Any, SimpleNamespace(caller=caller)), self.troubles, refusals, cast(Any, limiter), ready)
        context: Any = SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1", auth_context=dict, abort=abort)
        ready.set()
        with suppress(AttuneError):
            await checked._wrap("/attune.v1.Blobs/Upload", answer, None)(None, context)


LOST = [
    (LedgerBusy("the database postgresql://db cannot be used now"), "ledger"),
    (LedgerBusy("s3://bucket cannot be used now", "blobs"), "blobs"),
    (DiskFull("the disk of /srv is full"), "disk"),
    (OSError(errno.EMFILE, "Too many open files"), "disk"),
    (OSError(errno.EROFS, "Read-only file system"), "disk"),
]


@pytest.mark.parametrize(("error", "store"), LOST)
async def test_a_store_s_failure_in_a_device_s_call_is_cleared_by_no_other_call(
    monkeypatch: pytest.MonkeyPatch, error: Exception, store: str
) -> None:
    called = Called(monkeypatch)
    await called.call(error)
    await called.call()  # of a device that needs no store
    assert called.troubles.lines == [f"{store}: {error}"]
    assert called.troubles.keeping_out() == called.troubles.lines


@pytest.mark.parametrize(("error", "store"), LOST)
def test_a_trouble_has_the_name_of_the_store_and_not_of_the_step_that_met_it(monkeypatch, error: Exception, store: str) -> None:
    if not can_pass(error):
        pytest.skip("a step that meets it fails")
    monkeypatch.setattr(steps, "FIRST_DELAY_S", 0.0)
    troubles, said = Troubles(), list[list[str]]()

    async def attempt() -> None:
        said.append(troubles.lines)
        if len(said) < 3:
            raise error

    aio.run(troubles.overcome("closing round 2", attempt))
    assert said[1:] == [[f"{store}: {error}"]] * 2
    assert troubles.lines == [], "the same call of the same store was good"


def test_a_step_that_succeeds_clears_no_other_store(monkeypatch: pytest.MonkeyPatch) -> None:
    troubles = Troubles()
    troubles.met(LedgerBusy("s3://bucket cannot be used now", "blobs"))

    async def attempt() -> None: ...

    aio.run(troubles.overcome("writing the record", attempt))
    assert troubles.lines == ["blobs: s3://bucket cannot be used now"]


async def test_a_store_in_trouble_is_used_until_a_call_is_good(tmp_path: Path) -> None:
    """A disk without room for an update stays in trouble, although there is room for less."""
    troubles, storage = Troubles(), DiskStorage(tmp_path)
    storage.create()
    for error, _ in LOST[:3]:
        troubles.met(error)
    await try_stores(troubles, storage, 1 << 60)
    assert [line.partition(":")[0] for line in troubles.lines] == ["disk"]
    await try_stores(troubles, storage, 1 << 10)
    assert troubles.lines == []
    assert not [name for name in storage.blobs.names("") if "tried" in name], "nothing is left of the calls"
    await storage.close()
