"""HTTP server of the page. It runs on a thread of its own, so that browsers never delay the federation."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attune.common import aio
from attune.common.errors import PortInUse, SettingError
from attune.common.text import host_and_port
from attune.fedserver.process import check_installed

if TYPE_CHECKING:
    from attune.features.web.page_tokens import Keyring
    from attune.features.web.pages import Actions
    from attune.features.web.sources import LedgerSource

LOG = logging.getLogger("fedserver")
LOCAL = "127.0.0.1"
ANYWHERE = {"0.0.0.0": LOCAL, "::": "::1"}  # noqa: S104
STOP_S, CONNECT_S = 5.0, 2.0
BACKLOG = 16  # asyncio accepts so many connections at once, each with a descriptor


@dataclass(frozen=True)
class PageAddress:
    """Address at which the page is served. Port 0 stands for a free port."""

    host: str = LOCAL
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> PageAddress:
        """Parse `8080` or `HOST:8080`.

        Raises:
            SettingError: The text is neither.
        """
        host, _, port = text.rpartition(":")
        if not port.isascii() or not port.isdecimal() or int(port) > 65535:
            raise SettingError(f"--dashboard takes a port, HOST:PORT, or off; not {text!r}")
        return cls(host.strip("[]") or LOCAL, int(port))

    @property
    def local(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def url(self, token: str, advertised: str = "") -> str:
        """Return the URL of the page with its token; a page on all addresses has the host of `server.advertise`."""
        host = self.host
        if host in ANYWHERE:
            host = host_and_port(advertised)[0] if advertised else socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{self.port}/?token={token}"

    def answers(self) -> bool:
        """Return whether a process listens there."""
        try:
            socket.create_connection((ANYWHERE.get(self.host, self.host), self.port), timeout=CONNECT_S).close()
        except OSError:
            return False
        return True


def bind(place: PageAddress) -> socket.socket:
    """Bind the page's port.

    Raises:
        PortInUse: Another process listens there.
        SettingError: What the page is made with is not installed.
    """
    check_installed()
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    try:
        return socket.create_server((place.host, place.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise PortInUse(
            f"the dashboard cannot listen on {place.host}:{place.port} ({error.strerror or error}): choose another port "
            "(--dashboard PORT), or none (--dashboard off)"
        ) from None


def url_of(listener: socket.socket, token: str, advertised: str = "") -> str:
    """Return the URL of the page that is served on `listener`, with its token."""
    host, port = listener.getsockname()[:2]
    return PageAddress(host, port).url(token, advertised)


def names_of(host: str, advertised: str = "") -> set[str]:
    """Return the host names under which the page answers. `advertised`: the setting `server.advertise`."""
    others = set() if PageAddress(host).local else {host, socket.gethostname(), socket.getfqdn()}
    return {"localhost", *others, *([host_and_port(advertised)[0]] if advertised else [])}


@contextlib.contextmanager
def serving(
    listener: socket.socket,
    host: str,
    keys: Keyring,
    source: LedgerSource,
    actions: Actions | None = None,
    advertised: str = "",
) -> Iterator[None]:
    """Serve the page on `listener` during the block; then close source and listener.

    Args:
        listener: The bound port.
        host: The address at which it listens.
        keys: The tokens that admit to the page.
        source: The facts.
        actions: The buttons; None: there are none.
        advertised: The setting `server.advertise`.
    """
    names = names_of(host, advertised)
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def body() -> None:
        with aio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_serve(listener, names, keys, source, actions, stop))

    thread = threading.Thread(target=body, name="dashboard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(stop.set)
        thread.join(STOP_S)
        listener.close()
        source.close()


async def _serve(
    listener: socket.socket, names: set[str], keys: Keyring, source: LedgerSource, actions: Actions | None, stop: asyncio.Event
) -> None:
    import uvicorn

    from attune.features.web.guard import MOST_HEAD, BoundedHttp, Guard
    from attune.features.web.pages import NO_ACTIONS
    from attune.features.web.routes import Hub, Routes

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """No-op: signals are the federation's."""
            yield

    can = actions or NO_ACTIONS
    hub = Hub(source)
    app: Any = Guard(Routes(source, hub, can, keys).app(), keys, names, listener.getsockname()[1])
    config = uvicorn.Config(
        app, http=BoundedHttp, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=1, backlog=BACKLOG,
        h11_max_incomplete_event_size=MOST_HEAD,
    )  # fmt: skip
    server = Server(config)

    async def end() -> None:
        await stop.wait()
        hub.close()
        server.should_exit = True

    def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        LOG.error("dashboard: %s: %s", context["message"], context.get("exception", "no exception"))

    asyncio.get_running_loop().set_exception_handler(failed)
    ending = asyncio.create_task(end())
    await server.serve([listener])
    ending.cancel()
