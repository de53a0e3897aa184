"""How a device reaches its server: HOST:PORT, or several, and how long it waits between two tries."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from attune.common.errors import SettingError


@dataclass(frozen=True)
class ServerAddress:
    """Address of a server, as `--server` takes it, and of those that may take over from it."""

    host: str  # without brackets
    port: int
    others: tuple[ServerAddress, ...] = ()  # each without others

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
        first, *others = (*self.others, ServerAddress(self.host, self.port))
        return ServerAddress(first.host, first.port, tuple(others))

    @property
    def is_this_machine(self) -> bool:
        """Whether the host is a loopback name or address."""
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


PORTS = {"https": 443, "http": 80}
NO_STORE = "an S3 store is HOST, HOST:PORT or http://HOST:PORT, such as s3.example.org (--direct-host)"  # it may be a secret


def store_origin(text: str) -> str:
    """Return an address of an S3 store as scheme://host:port, without what follows the host. HOST[:PORT] alone means https.

    Raises:
        SettingError: It is no such address, or has a name or password in it.
    """
    try:
        parts = urlsplit(text if "://" in text else f"https://{text}")
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise SettingError(NO_STORE) from None
    if not re.fullmatch(r"[a-z0-9._-]+|[0-9a-f:.]+", host) or parts.scheme not in PORTS or "@" in parts.netloc:
        raise SettingError(NO_STORE)
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port or PORTS[parts.scheme]}"
