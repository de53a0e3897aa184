"""Decisions of an operator and enrolments are carried out to their end, also if the call ends before it."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attune.common import aio
from attune.common.errors import CertificateRefused, UpdateRefused
from attune.common.exchange.messages import EnrolRequest
from attune.features.web.pages import Actions, DeviceName
from attune.fedserver.federation.steps import Turns
from attune.fedserver.identity.admin import FederationAdmin
from attune.fedserver.identity.registrar import Caller
from attune.fedserver.pb import admin_pb2 as pb
from attune.fedserver.ports.blobs import Damaged
from attune.fedserver.rpc.admin_service import AdminService
from attune.fedserver.rpc.auth import CALLER
from attune.fedserver.rpc.service import FederationService
from tests.fedserver.conftest import World
from tests.fedserver.federation.test_coordinator import Server, running

Call = Callable[[AdminService, str], Awaitable[Any]]


async def vanish(call: Awaitable[Any], begun: asyncio.Event, goes_on: asyncio.Event) -> None:
    """Cancel a call when its work has begun, as gRPC does for a caller that vanishes. Then let the work go on."""
    calling = asyncio.ensure_future(call)
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    goes_on.set()


async def revoked(server: Server) -> bool:
    device = await server.ledger.device("a")
    return device is not None and device.revoked and server.state.streams.get("a") is None


async def withdrawn(server: Server) -> bool:
    tokens = await server.ledger.tokens()
    return all(token.withdrawn_at is not None for token in tokens) and await revoked(server)


async def paused(server: Server) -> bool:
    return (await server.ledger.snapshot()).record.paused


async def made(server: Server) -> bool:
    return len(await server.ledger.tokens()) == 2


@pytest.mark.parametrize(
    ("call", "done"),
    [
        (lambda service, token: service.Revoke(pb.RevokeRequest(name="a"), None), revoked),
        (lambda service, token: service.RevokeToken(pb.RevokeTokenRequest(id=token, devices=True), None), withdrawn),
        (lambda service, token: service.Pause(pb.PauseRequest(paused=True), None), paused),
        (lambda service, token: service.NewToken(pb.NewTokenRequest(), None), made),
    ],
)
async def test_a_decision_goes_on_when_its_caller_vanishes_after_the_line_in_the_audit_log(
    world: World, monkeypatch: pytest.MonkeyPatch, call: Call, done: Callable[[Server], Awaitable[bool]]
) -> None:
    async with running(world) as server:
        admin, note, noted, goes_on = (
            FederationAdmin(server.ledger, "operator"),
            server.ledger.note,
            asyncio.Event(),
            asyncio.Event(),
        )
        await admin.new_token(b"k" * 33)
        [token] = await server.ledger.tokens()
        for name in "ab":
            await server.ledger.update_device(name, token=token.id)
        [stream, _] = server.connect("a", "b")

        async def slow(*arguments: Any, **facts: Any) -> None:
            await note(*arguments, **facts)
            noted.set()
            await goes_on.wait()

        async def refresh() -> None:
            pass

        monkeypatch.setattr(server.ledger, "note", slow)
        registrar = SimpleNamespace(refresh=refresh, authority=SimpleNamespace(public_key_compressed=b"k" * 33))
        service = AdminService(server.coordinator, cast(Any, registrar), admin, server.ledger)
        await vanish(call(service, token.id), noted, goes_on)
        async with aio.timeout(10):
            while not await done(server):  # noqa: ASYNC110 (the ledger tells nobody)
                await asyncio.sleep(0.01)
        if done in (revoked, withdrawn):
            with pytest.raises(CertificateRefused):
                while await stream.next() is not None:
                    pass


async def test_an_action_of_the_page_goes_on_when_its_caller_vanishes() -> None:
    begun, goes_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def revoke(asked: DeviceName, by: str) -> dict[str, Any]:
        begun.set()
        await goes_on.wait()
        done.set()
        return {}

    actions = Actions({"revoke": revoke}, asyncio.get_running_loop())
    await vanish(actions.do("revoke", b'{"name": "a"}', "ada"), begun, goes_on)
    async with aio.timeout(10):
        await done.wait()


@pytest.mark.parametrize("call", ["enrol", "renew"])
async def test_a_certificate_is_issued_to_its_end_when_the_device_vanishes(call: str) -> None:
    """Vanish while the ledger is written: the audit log has the line already. A readmitted name is let in at once."""
    begun, goes_on, issued, readmitted = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[str]()

    async def issue(*_: Any) -> bytes:
        begun.set()
        await goes_on.wait()
        issued.set()
        return b"a certificate"

    registrar = SimpleNamespace(enrol=issue, renew=issue, authority=SimpleNamespace(certificate_pem=b"of the authority"))
    members, nobody = SimpleNamespace(readmit=readmitted.append), cast(Any, None)
    service = FederationService(cast(Any, members), nobody, cast(Any, registrar), nobody, Turns())
    CALLER.set(Caller("device", "ada", "print"))
    request = {"enrol": EnrolRequest("ada", b"csr"), "renew": b"csr"}[call]
    await vanish(getattr(service, call)(request, nobody), begun, goes_on)
    async with aio.timeout(10):
        await issued.wait()
    await asyncio.sleep(0)
    assert readmitted == (["ada"] if call == "enrol" else [])


@pytest.mark.parametrize(
    ("error", "written"),
    [(UpdateRefused("it is not finite"), False), (Damaged("a file is damaged"), True), (ValueError("a defect"), True)],
)
async def test_a_refusal_that_nobody_waits_for_is_not_written(caplog, error: Exception, written: bool) -> None:
    """Hang up before the refusal: else a peer could fill the log with tracebacks."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def refuse() -> None:
        begun.set()
        await goes_on.wait()
        raise error

    await vanish(Turns().carry(refuse()), begun, goes_on)
    for _ in range(3):
        await asyncio.sleep(0)
    assert (str(error) in caplog.text) == written
