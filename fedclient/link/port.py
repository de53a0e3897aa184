"""Link of a device to its server: a port with two implementations.

They are fedclient.link.grpc_link over the network, and simulation.in_process within the process. An error that the server names
(a `kind`) is raised as that error. Every failure of a transport is raised as Broken. A task that is cancelled gets
CancelledError, whatever else happens in the same moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import NoReturn, Protocol

from attune.common.errors import CertificateRefused, FingerprintMismatch, HomeMismatch, NotEnrolled, SettingError
from attune.common.exchange.messages import Answer, Hello, Update, UploadTarget
from attune.fedclient.home import Identity
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
    """The transport failed; the same call may succeed later. `connecting`: no server answered."""

    def __init__(self, reason: str, connecting: bool = False) -> None:
        super().__init__(reason)
        self.connecting = connecting


class Link(Protocol):
    """One device's way to its server.

    open: set while the control stream is. inline_bytes: of blobs that the server takes within an update. waits: an update may
    be submitted while its blobs are on their way. Both are what the server has said on the present stream. renews: there is a
    certificate to renew.
    """

    open: asyncio.Event
    inline_bytes: int
    waits: bool
    renews: bool

    @property
    def name(self) -> str:
        """Name under which the server knows the device."""

    @property
    def identity(self) -> Identity:
        """Key and certificate of the device, and the authority that it trusts."""

    async def control(self, hello: Hello, handle: Handle) -> NoReturn:
        """Open the control stream and pass on its messages, StreamOpened first.

        Raises:
            Broken: The transport failed.
            AttuneError: The server named an error.
        """

    def progress(self, order_id: str, done: float) -> None:
        """Send the progress of an order. It is dropped without a stream, or if too many messages wait."""

    def trouble(self, order_id: str, reason: str) -> None:
        """Report that an order cannot be carried out.

        The report is dropped without a stream, because the server sends the order again on the next one.
        """

    def answer(self, message: Answer) -> None:
        """Send a message of secure aggregation, statistics, verdicts on units, or a description.

        It is dropped without a stream, because the server asks again on the next one.
        """

    async def decline(self, reason: str) -> None:
        """Say that this device takes no part, and why, and end the stream, whether the server hears it or not."""

    async def read(self, digest: str, offset: int, take: Callable[[bytes], None]) -> None:
        """Pass the blob's bytes from `offset` on to `take`, in order.

        Raises:
            Broken: The transport failed.
            UnknownBlob, Forbidden: The server does not offer the blob.
        """

    async def upload_offset(self, target: UploadTarget) -> int:
        """Return how many bytes of the target the server has.

        Raises:
            Broken: The transport failed.
            AttuneError: The server named an error.
        """

    async def upload(self, target: UploadTarget, frames: Iterator[bytes]) -> None:
        """Send the bytes from target.offset on, and return when the server has checked the whole blob.

        Raises:
            Broken: The transport failed, or the server did not get all bytes.
            AttuneError: The server named an error.
        """

    async def submit(self, update: Update) -> bool:
        """Hand in an update, and return whether it came in time.

        Raises:
            Broken: The transport failed.
            AttuneError: The server named an error.
        """

    async def renew(self) -> bool:
        """Renew the device's certificate if that is due, and return whether it was.

        Raises:
            Broken: The transport failed.
            CertificateRefused: The server refuses the device.
        """

    async def diagnosis(self) -> str:
        """Return why no server answered, if waiting can help.

        Raises:
            FingerprintMismatch, CertificateRefused: Waiting cannot help.
        """

    async def close(self) -> None:
        """End all calls."""
