"""A device behind an HTTP proxy: what it takes for one, and what it says of one that does not pass it on."""

import asyncio
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from attune.common import aio
from attune.common.errors import AttuneError, FingerprintMismatch, SettingError, Unreachable
from attune.common.identity.credential import short_form
from attune.fedclient.address import Proxy, ServerAddress
from attune.fedclient.cli import main
from attune.fedclient.doctor import reachable
from attune.fedclient.link.diagnose import diagnose
from attune.fedserver.identity.authority import Authority
from tests.connect_proxy import ConnectProxy, certificate, connect_proxy

NAMES = ("grpc_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "http_proxy", "no_proxy", "NO_PROXY")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leave no proxy in the environment, and return what puts one there."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)

    def put(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize("text", ["proxy.example:3128", "http://proxy.example:3128", "http://proxy.example:3128/"])
def test_a_proxy_is_host_and_port(text: str) -> None:
    assert Proxy.parse(text) == Proxy("proxy.example", 3128)
    assert Proxy.parse("http://[::1]:80") == Proxy("::1", 80)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("proxy.example", "HOST:PORT"),
        ("https://proxy.example:3128", "HOST:PORT"),
        ("socks5://proxy.example:1080", "HOST:PORT"),
        ("http://proxy.example:3128/path", "HOST:PORT"),
        ("http://ana:geheim@proxy.example:3128", "--proxy-credentials"),
    ],
)
def test_other_proxies_are_refused_without_a_secret_in_the_error(text: str, said: str, environment: Any) -> None:
    with pytest.raises(SettingError, match=said) as caught:
        Proxy.parse(text)
    assert "geheim" not in str(caught.value)
    environment(https_proxy=text)
    with pytest.raises(SettingError, match="https_proxy"):
        Proxy.parse("env")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy:1"}, Proxy("proxy", 1)),
        ({"HTTPS_PROXY": "proxy:2"}, Proxy("proxy", 2)),
        ({"all_proxy": "http://proxy:3", "https_proxy": "http://proxy:1"}, Proxy("proxy", 1)),
        ({"grpc_proxy": "http://proxy:4", "https_proxy": "http://proxy:1"}, Proxy("proxy", 4)),
        ({"http_proxy": "http://proxy:5"}, None),
    ],
    ids=str,
)
def test_the_environments_proxy_is_taken_only_when_asked_for(given: Any, expected: Proxy | None, environment: Any) -> None:
    environment(**given)
    assert Proxy.parse("env") == expected
    assert ServerAddress.parse("server.example:1").way is None


def test_hosts_of_no_proxy_are_reached_directly(environment: Any) -> None:
    address = ServerAddress.parse("a.example:1,b.internal:2").by(Proxy("proxy", 3))
    environment(no_proxy="internal")
    assert (address.way, address.next.way) == (Proxy("proxy", 3), None)
    assert address.next.next == address


def test_credentials_come_from_a_file_and_are_shown_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text("ana:p@ss:word\n")
    proxy = Proxy.parse("proxy:1", path)
    assert proxy is not None and proxy.credentials == "ana:p@ss:word" and "p@ss" not in f"{proxy} {proxy!r}"
    for wrong in ("ana", ":word", "ana:word\nben:word", ""):
        path.write_text(wrong)
        with pytest.raises(SettingError, match="USER:PASSWORD"):
            Proxy.parse("proxy:1", path)
    with pytest.raises(SettingError, match="cannot be read"):
        Proxy.parse("proxy:1", tmp_path / "none")
    with pytest.raises(SettingError, match="--proxy"):
        Proxy.parse(None, path)
    done = CliRunner().invoke(main, ["doctor", "--server", "a:1", "--proxy", "http://ana:geheim@proxy:1"])
    assert done.exit_code == 2 and "--proxy-credentials" in done.output and "geheim" not in done.output


def words_of(proxy: ConnectProxy, authority: Authority, device: Any, port: int, credentials: str = "") -> AttuneError:
    host, _, own = proxy.address.rpartition(":")
    through = Proxy(host, int(own), credentials)
    return diagnose("federation.invalid", port, authority.certificate_pem, device(authority), 5.0, proxy=through)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--answer", "403"), r"does not let this device connect to federation\.invalid:\d+ \(403.*CONNECT"),
        (("--credentials", "ana:geheim"), r"wants credentials \(407.*--proxy-credentials"),
        ((), r"cannot reach federation\.invalid:\d+ \(502"),
    ],
    ids=("forbidden", "credentials", "nobody"),
)
def test_a_proxy_that_does_not_connect_is_told_apart_from_a_server_that_is_away(
    words: tuple[str, ...], said: str, authority: Authority, device: Any, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = placeholder.getsockname()[1]
    with connect_proxy(tmp_path, *words) as proxy:
        answer = words_of(proxy, authority, device, port)
        assert type(answer) is Unreachable and re.search(said, str(answer)), answer
        assert proxy.address in str(answer)
        checked = reachable(ServerAddress("federation.invalid", port).by(Proxy.parse(proxy.address)))
        assert checked.verdict == "FAIL" and re.search(said, checked.text)
        if "--credentials" in words:
            again = words_of(proxy, authority, device, port, "ana:falsch")
            assert "does not accept the credentials" in str(again) and "falsch" not in str(again)


def test_a_proxy_that_is_away_or_none_is_named(authority: Authority, device: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for host, said in (("127.0.0.1", "refused"), ("proxy.invalid", "proxy.invalid")):
        through = Proxy(host, port)
        answer = diagnose("federation.invalid", 1, authority.certificate_pem, device(authority), 5.0, proxy=through)
        assert type(answer) is Unreachable and f"The proxy {through} cannot be reached" in str(answer)
        assert said in str(answer) and "--proxy" in str(answer)


def test_a_proxy_that_opens_tls_is_named_as_such(authority: Authority, device: Any, tmp_path: Path) -> None:
    words = ("--opens-tls", str(certificate(tmp_path)))
    with socket.create_server(("127.0.0.1", 0)) as there, connect_proxy(tmp_path, *words) as proxy:
        answer = words_of(proxy, authority, device, there.getsockname()[1])
    assert type(answer) is FingerprintMismatch
    assert f"The proxy {proxy.address} opens TLS" in str(answer) and "Hospital Web Filter CA" in str(answer)
    assert "unopened" in str(answer)


def test_another_federation_behind_a_proxy_is_not_blamed_on_the_proxy(
    authority: Authority, stranger: Authority, device: Any, serve: Any, live: Any, tmp_path: Path
) -> None:
    async def scenario(proxy: ConnectProxy) -> AttuneError:
        async with serve(live) as served:
            return await asyncio.to_thread(words_of, proxy, stranger, device, served.port)

    with connect_proxy(tmp_path) as proxy:
        answer = aio.run(scenario(proxy))
    assert type(answer) is FingerprintMismatch and "opens TLS" not in str(answer)
    assert short_form(stranger.certificate_pem) in str(answer)
