"""A wrong clock, of the device or of the server, ends no device for good: certificates are judged by both clocks."""

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest

from attune.common import aio, grpc_errors
from attune.common.errors import CertificateRefused, Unreachable
from attune.common.grpc_errors import TIME_KEY, from_rpc
from attune.common.identity.credential import csr_der, new_key
from attune.fedclient.address import ServerAddress
from attune.fedclient.home import Identity
from attune.fedclient.link import grpc_link
from attune.fedclient.link.enrol import check_usable
from attune.fedclient.link.grpc_link import GrpcLink
from attune.fedclient.link.port import Broken
from attune.fedserver.identity.authority import Authority
from attune.fedserver.identity.server_tls import LiveServerCredentials
from tests.fedclient.link.test_diagnose import diagnosed_against

AWAY = timedelta(days=100)
NOW = datetime.now(timezone.utc)


@pytest.mark.parametrize("away", [AWAY, -AWAY])
def test_a_server_whose_clock_is_away_refuses_for_now(
    authority: Authority, live: LiveServerCredentials, device: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, away: timedelta
) -> None:
    """The certificate is good for this device, and not for the server, as when the server's clock is 100 days away."""
    credential = device(authority, now=NOW - away)
    monkeypatch.setattr("attune.fedclient.link.diagnose.now", lambda: NOW - away)
    live = LiveServerCredentials([authority.certificate_pem], authority.issue_server(now=NOW - away))
    answer = diagnosed_against(serve, live, authority.certificate_pem, credential)
    assert type(answer) is Unreachable
    assert "clock" in str(answer)


@pytest.mark.parametrize("away", [AWAY, -AWAY])
def test_a_device_whose_clock_is_away_goes_on_trying(
    authority: Authority, live: LiveServerCredentials, device: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, away: timedelta
) -> None:
    monkeypatch.setattr("attune.fedclient.link.diagnose.now", lambda: NOW + away)
    answer = diagnosed_against(serve, live, authority.certificate_pem, device(authority))
    assert type(answer) is Unreachable
    assert "clock" in str(answer)


def test_a_certificate_that_has_expired_for_both_is_final(
    authority: Authority, live: LiveServerCredentials, device: Any, serve: Any
) -> None:
    answer = diagnosed_against(serve, live, authority.certificate_pem, device(authority, days=30, now=NOW - timedelta(days=40)))
    assert type(answer) is CertificateRefused
    assert "--token-file" in str(answer)


class Refusal(grpc.aio.AioRpcError):  # type: ignore[misc]
    """Refusal of a call by a server whose clock shows `time`."""

    def __init__(self, message: str, time: datetime | None) -> None:
        trailing = [(grpc_errors.KIND_KEY, CertificateRefused.kind)]
        trailing += [(TIME_KEY, f"{time.timestamp():.0f}")] if time is not None else []
        super().__init__(grpc.StatusCode.UNAUTHENTICATED, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=message)


@pytest.mark.parametrize(
    ("time", "final"),
    [(NOW + AWAY, False), (NOW - AWAY, False), (NOW, True), (None, True)],
    ids=["ahead", "behind", "same", "old"],
)
def test_a_refusal_by_a_server_whose_clock_is_away_is_not_final(
    authority: Authority, device: Any, tmp_path: Path, time: datetime | None, final: bool
) -> None:
    async def scenario() -> Exception:
        link = GrpcLink(ServerAddress("127.0.0.1", 1), Identity("kiel", device(authority), authority.certificate_pem), print)
        return link.judged(Refusal("the certificate of kiel has expired", time))

    error = aio.run(scenario())
    assert type(error) is (CertificateRefused if final else Broken)
    assert final or "clock" in str(error)


def test_every_refusal_of_the_server_carries_its_time() -> None:
    sent: list[Any] = []

    class Context:
        async def abort(self, code: Any, details: str, trailing: Any) -> None:
            sent.extend(trailing)

    with pytest.raises(CertificateRefused):
        aio.run(grpc_errors.abort(Context(), CertificateRefused("no")))  # type: ignore[arg-type]
    assert abs(int(dict(sent)[TIME_KEY]) - NOW.timestamp()) < 3600
    assert isinstance(from_rpc(Refusal("no", NOW)), CertificateRefused)


@pytest.mark.parametrize("away", [AWAY, -AWAY])
async def test_a_certificate_for_another_time_is_not_kept(
    authority: Authority, device: Any, monkeypatch: pytest.MonkeyPatch, away: timedelta
) -> None:
    """Renewed by a server whose clock is away. It would take the place of a certificate that is still good."""
    asked: list[int] = []

    class Wire:
        """Channel to a server whose clock is away."""

        def unary(self, call: object) -> Any:
            async def answer(csr: bytes) -> Any:
                asked.append(1)
                return type("Issued", (), {"certificate_pem": authority.issue_device(csr, "kiel", 90, now=NOW + away)})()

            return lambda csr, timeout: answer(csr)

        def call(self, call: Any) -> Any:
            import contextlib

            return contextlib.nullcontext(call)

    kept: list[Identity] = []
    monkeypatch.setattr(grpc_link, "needs_renewal", lambda pem, now: True)
    link = GrpcLink(ServerAddress("127.0.0.1", 1), Identity("kiel", device(authority), authority.certificate_pem), kept.append)
    link._wire = Wire()  # type: ignore[assignment]
    with pytest.raises(Broken, match="clock"):
        await link.renew()
    assert await link.renew() is False  # not again at once: certificates are counted
    assert (kept, len(asked)) == ([], 1)


def test_an_allowance_of_hours_for_clocks_stays(authority: Authority) -> None:
    key = new_key()
    pem = authority.issue_device(csr_der(key, "kiel"), "kiel", 90, now=NOW + timedelta(hours=5))
    check_usable(pem, NOW)
    with pytest.raises(Unreachable, match="clock"):
        check_usable(authority.issue_device(csr_der(key, "kiel"), "kiel", 90, now=NOW + AWAY), NOW)
