"""How a device reaches its server: HOST:PORT, or several, maybe through a proxy, and how long it waits between two tries."""

from __future__ import annotations

import base64
import ipaddress
import re
import socket
import time
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from attune.common.errors import SettingError, Unreachable
from attune.common.text import clean

ENVIRONMENT = ("grpc", "https", "all")  # the proxies of the environment, such as https_proxy; the first that is set counts
MAX_CREDENTIALS = 1024  # characters
MOST_HEAD = 64 << 10  # bytes of a proxy's answer


@dataclass(frozen=True)
class Proxy:
    """HTTP proxy through whose CONNECT a device reaches servers. What passes it is encrypted end to end all the same.

    Attributes:
        host: Its name or address, without brackets.
        port: Its port.
        credentials: USER:PASSWORD for Basic authentication, which the proxy and the network before it can read; empty: none.
    """

    host: str
    port: int
    credentials: str = field(default="", repr=False)

    @classmethod
    def parse(cls, text: str | None, credentials: Path | None = None) -> Proxy | None:
        """Read what `--proxy` takes: HOST:PORT or http://HOST:PORT, or `env` for the proxy of the environment, if it has one.

        Args:
            text: The text; None: no proxy.
            credentials: File with USER:PASSWORD.

        Raises:
            SettingError: The text has another form or holds a password, or the file has another form or cannot be read.
        """
        option = "--proxy"
        if text == "env":
            there = urllib.request.getproxies_environment()
            name = next((name for name in ENVIRONMENT if name in there), None)
            option, text = f"{name}_proxy", there.get(name or "")
        elif text is None and credentials is not None:
            raise SettingError("--proxy-credentials are for a proxy: name it with --proxy")
        if text is None:
            return None
        address = text.removeprefix("http://").removesuffix("/")
        if "@" in address:
            raise SettingError(f"{option} holds a name or password, which others can see: --proxy-credentials FILE takes them")
        try:
            of = ServerAddress.parse(address)
        except SettingError:
            raise SettingError(f"{option} takes HOST:PORT or http://HOST:PORT of an HTTP proxy, not {text[:100]!r}") from None
        return cls(of.host, of.port, "" if credentials is None else _credentials_in(credentials))

    def __str__(self) -> str:
        return ServerAddress(self.host, self.port).target

    def serves(self, host: str) -> bool:
        """Return whether the host is reached through the proxy: the environment's `no_proxy` does not name it, as in gRPC."""
        return not urllib.request.proxy_bypass(host)

    def connect(self, address: ServerAddress, timeout_s: float) -> socket.socket:
        """Return a TCP connection to a server through the proxy; the connection and the proxy's answer have `timeout_s`.

        Raises:
            Unreachable: There is none. The message says which of both is the cause, as far as the proxy tells.
        """
        deadline = time.monotonic() + timeout_s
        try:
            opened = socket.create_connection((self.host, self.port), timeout_s)
        except OSError as error:
            raise Unreachable(f"The proxy {self} cannot be reached ({error}). Check --proxy.") from None
        try:
            self._ask(opened, address, deadline)
        except BaseException:
            opened.close()
            raise
        opened.settimeout(timeout_s)
        return opened

    def _ask(self, opened: socket.socket, address: ServerAddress, deadline: float) -> None:
        """Let the proxy connect to an address.

        The standard library's own way waits for ever if headers have no end.
        """
        secret = base64.b64encode(self.credentials.encode()).decode()
        credentials = f"Proxy-Authorization: Basic {secret}\r\n" if secret else ""
        head = b""
        try:
            opened.sendall(f"CONNECT {address.target} HTTP/1.1\r\nHost: {address.target}\r\n{credentials}\r\n".encode())
            while b"\r\n\r\n" not in head and len(head) < MOST_HEAD:
                opened.settimeout(max(0.001, deadline - time.monotonic()))
                piece = opened.recv(4096)
                if not piece:
                    break
                head += piece
        except OSError as error:
            raise Unreachable(f"The proxy {self} does not answer ({error}). Check --proxy.") from None
        answer = re.match(rb"HTTP/1\.[01] (\d{3}[^\r\n]*)\r\n(?:[^\r\n]+\r\n)*\r\n", head)
        if answer is None:
            raise Unreachable(f"What answers at {self} is no HTTP proxy. Check --proxy.")
        if not answer[1].startswith(b"2"):
            raise Unreachable(self._refusal(address.target, clean(answer[1].decode("latin-1").strip(), 100)))
        if answer.end() < len(head):
            raise Unreachable(f"The proxy {self} speaks in the server's place. Check --proxy.")

    def _refusal(self, target: str, said: str) -> str:
        """Return why there is no connection, from the status that the proxy answered."""
        if said.startswith("407") and self.credentials:
            return (
                f"The proxy {self} does not accept the credentials of --proxy-credentials ({said}). Basic ones alone are known."
            )
        if said.startswith("407"):
            return f"The proxy {self} wants credentials ({said}): write USER:PASSWORD into a file for --proxy-credentials."
        if said.startswith("5"):
            return f"The proxy {self} cannot reach {target} ({said}). Is the server running? Check --server."
        return f"The proxy {self} does not let this device connect to {target} ({said}): let it pass this port on by CONNECT."


def _credentials_in(path: Path) -> str:
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            text = file.read(MAX_CREDENTIALS).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--proxy-credentials: {path} cannot be read ({error})") from None
    if not re.fullmatch(r"[^:\r\n]+:[^\r\n]*", text):
        raise SettingError(f"--proxy-credentials: {path} must hold one line, USER:PASSWORD")
    return text


@dataclass(frozen=True)
class ServerAddress:
    """Address of a server, as `--server` takes it, and of those that may take over from it."""

    host: str  # without brackets
    port: int
    others: tuple[ServerAddress, ...] = ()  # each without others
    proxy: Proxy | None = None  # that of the device

    @classmethod
    def parse(cls, text: str) -> ServerAddress:
        """Read `host:port`, `1.2.3.4:port` or `[::1]:port`, or several with commas between them.

        Raises:
            SettingError: The text has another form.
        """
        first, *others = (cls._one(one.strip()) for one in text.split(","))
        return cls(first.host, first.port, tuple(others))

    @classmethod
    def _one(cls, text: str) -> ServerAddress:
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536 or (":" in host and not bracketed):
            raise SettingError(f"--server takes HOST:PORT, such as server.example.org:50051 or [::1]:50051, not {text!r}")
        return cls(host, int(port))

    def __str__(self) -> str:
        return ",".join([self.target, *(other.target for other in self.others)])

    @property
    def target(self) -> str:
        """HOST:PORT of the first."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def next(self) -> ServerAddress:
        """The same addresses, to be tried from the second one on."""
        first, *others = (*self.others, replace(self, others=()))
        return replace(first, others=tuple(others))

    def by(self, proxy: Proxy | None) -> ServerAddress:
        """Return the same addresses for a device with this proxy."""
        return replace(self, proxy=proxy, others=tuple(replace(other, proxy=proxy) for other in self.others))

    @property
    def way(self) -> Proxy | None:
        """The proxy through which the first one is reached; None: it is reached directly."""
        return self.proxy if self.proxy is not None and self.proxy.serves(self.host) else None

    @property
    def proxy_url(self) -> str:
        """This proxy with its credentials, as gRPC takes it; empty without one. Show it to nobody."""
        if self.way is None:
            return ""
        user, colon, password = self.way.credentials.partition(":")
        return f"http://{quote(user, safe='')}:{quote(password, safe='')}@{self.way}" if colon else f"http://{self.way}"

    @property
    def is_this_machine(self) -> bool:
        """True if the host is a loopback name or address."""
        if self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 10.0
CONNECT_TIMEOUT_S = 300.0  # without a word from the server, unless the device's owner says otherwise


def backoff_s(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row (1, 2, ...).

    They double up to a limit. The caller adds jitter.
    """
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 10))
