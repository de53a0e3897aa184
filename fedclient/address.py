"""How a device reaches its server: HOST:PORT, or several, and how long it waits between two tries."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

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
