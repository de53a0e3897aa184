"""What a device needs of the network: its whole life below the session passes through here.

An implementation is a way to a server: fedclient.link.grpc_link over the network, fedclient.link.local within the process. What
the server names (a `kind`) is raised as that error; every way in which a transport can fail is raised as Broken, and a task
that is cancelled hears CancelledError, whatever else happens in the same moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import NoReturn, Protocol

from attune.common.errors import CertificateRefused, FingerprintMismatch, HomeMismatch, NotEnrolled, SettingError
from attune.common.exchange.messages import Hello, Update, UploadTarget
from attune.fedclient.messages import Event

FINAL = (
    CertificateRefused,
    FingerprintMismatch,
    HomeMismatch,
    NotEnrolled,
    SettingError,
)  # end the device, not the order alone

Handle = Callable[[Event], Awaitable[None]]


class Broken(Exception):
    """The transport failed; the same call may succeed later. `connecting`: nobody answered at all."""

    def __init__(self, reason: str, connecting: bool = False) -> None:
        super().__init__(reason)
        self.connecting = connecting


class Link(Protocol):
    """One device's way to its server.

    open: set while the control stream is. inline_bytes: of blobs that the server takes within an update. waits: an update may
    be submitted while its blobs are on their way. Both are what the server has said on the present stream.
    """

    open: asyncio.Event
    inline_bytes: int
    waits: bool

    @property
    def name(self) -> str:
        """Under which the server knows the device."""

    async def control(self, hello: Hello, handle: Handle) -> NoReturn:
        """Opens the control stream and hands over what comes, Opened first. Errors: Broken, or what the server named."""

    def progress(self, order_id: str, done: float) -> None:
        """Dropped while there is no stream, or when too much waits for it."""

    def trouble(self, order_id: str, reason: str) -> None:
        """Dropped while there is no stream: the server sends the order again on the next one."""

    async def decline(self, reason: str) -> None:
        """Says that this device takes no part, and why, and ends the stream; at once or after a moment, heard or not."""

    async def read(self, digest: str, offset: int, take: Callable[[bytes], None]) -> None:
        """Hands the blob's bytes from `offset` on to `take`, in order. Errors: Broken, UnknownBlob, Forbidden."""

    async def upload_offset(self, target: UploadTarget) -> int:
        """How many bytes of the target the server has. Errors: Broken, or what the server named."""

    async def upload(self, target: UploadTarget, frames: Iterator[bytes]) -> None:
        """Sends the bytes from target.offset on; returns when the server has checked the whole.

        Errors: Broken (also if the server has not got all), or what the server named.
        """

    async def submit(self, update: Update) -> bool:
        """Whether the update came in time. Errors: Broken, or what the server named."""

    async def renew(self) -> bool:
        """Renews what the device shows itself by, if that is due: whether it was. Errors: Broken, CertificateRefused."""

    async def diagnosis(self) -> str:
        """Why nobody answered, if waiting can help. Errors: FingerprintMismatch, CertificateRefused if it cannot."""

    async def close(self) -> None:
        """Ends everything that is under way."""
