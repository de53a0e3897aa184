"""The messages between server and device, as both sides use them; attune.common.exchange.protobuf writes and reads them.

JSON inside a message stays bytes here. Whoever takes a message in reads it (`read_profile`, `common.metrics.read_metrics`), so
that an error names the peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from attune.common.errors import SettingError
from attune.common.plan import Profile
from attune.common.protocol import INLINE_BYTES, PROTOCOL, SPOKEN, STATISTICS_ORDER
from attune.common.text import clean, from_json

WorkName = Literal["train", "evaluate"]


class BlobRef(msgspec.Struct, frozen=True):
    """One part's tensors, named by the digest of their bytes.

    version: of an order, how many rounds were closed when the value was made; of an update, the version that its training
    began from.
    """

    part: str
    digest: str  # ALGORITHM:HEX
    size: int  # bytes
    version: int = 0
    encoding: str = ""  # of the tensors; empty: safetensors
    data: bytes = b""  # the blob itself, if it is small; empty: it is transferred by itself
    smaller: BlobRef | None = None  # the same value in fewer bytes; then `digest` is that of the value itself
    base: str = ""  # of `smaller`: the digest of the older value from which it is the change; empty: it needs none

    @property
    def sent(self) -> BlobRef:
        """The blob that a device is expected to fetch for this value."""
        return self.smaller or self

    @property
    def whole(self) -> BlobRef:
        """The same value, without a smaller form."""
        return replace(self, smaller=None, base="") if self.smaller else self

    def carrying(self, data: bytes) -> BlobRef:
        """Return the reference with the bytes of what is sent in it."""
        return replace(self, smaller=replace(self.smaller, data=data)) if self.smaller else replace(self, data=data)


class Order(msgspec.Struct, frozen=True):
    """One piece of work for one device. The id is the same after a restart of either side."""

    id: str
    round: int
    work: WorkName
    downloads: tuple[BlobRef, ...] = ()
    returns: tuple[str, ...] = ()  # parts to hand in
    # What a device without history is served, to compare with. PART/DEVICE is another device's network (Plan.matrix).
    cold_start: tuple[BlobRef, ...] = ()
    trains: tuple[str, ...] = ()  # kinds of tensors that move in training; empty: all
    deadline_s: float = 0.0  # left when the order was sent; 0: none
    encodings: Mapping[str, str] = {}  # part -> encoding of what is handed in; a part without one is plain
    # Shares of models, as other devices found them: of those in CHOICES, and of the fitted ones among themselves.
    prior: Mapping[str, float] = {}
    # Where devices keep their embeddings: the round of this device's last update that counted -> the weight of all its updates.
    counted: Mapping[int, float] = {}

    @property
    def whole(self) -> Order:
        """The same order, with all values in their plain form."""
        downloads, cold_start = (tuple(ref.whole for ref in refs) for refs in (self.downloads, self.cold_start))
        return replace(self, downloads=downloads, cold_start=cold_start)

    def carrying(self, data: Mapping[str, bytes]) -> Order:
        """Return the order with these blobs (digest -> bytes) in it, each once."""
        left = dict(data)
        downloads = [ref.carrying(left.pop(ref.sent.digest, b"")) for ref in self.downloads]
        cold_start = [ref.carrying(left.pop(ref.sent.digest, b"")) for ref in self.cold_start]
        return replace(self, downloads=tuple(downloads), cold_start=tuple(cold_start))


class Update(msgspec.Struct, frozen=True):
    """A device's answer to an order. Its blobs were uploaded before, or (small ones) travel in it."""

    order_id: str
    parts: tuple[BlobRef, ...]
    samples: int  # training samples that the update stands for
    metrics_json: bytes = b"{}"  # common.metrics.Metrics
    attempt: int = 0  # of secure aggregation, whose keys mask the parts; 0: they are not masked


class Receipt(msgspec.Struct, frozen=True):
    """The server's answer to an update. late: why it does not count; empty: it is durable and counts."""

    late: str = ""


class UploadTarget(msgspec.Struct, frozen=True):
    """One blob of an update on its way: `size` bytes with this digest, as one part of the answer to the order."""

    order_id: str
    part: str
    digest: str
    size: int  # bytes
    offset: int = 0  # where this stream of bytes starts


class DownloadRequest(msgspec.Struct, frozen=True):
    """A blob that the device was offered, from this offset on."""

    digest: str
    offset: int = 0


class EnrolRequest(msgspec.Struct, frozen=True):
    """Request of a device for its first certificate. csr_der: PKCS#10."""

    name: str
    csr_der: bytes


class IssuedCertificate(msgspec.Struct, frozen=True):
    """A device's certificate, the authority's, and the name under which the server knows the device."""

    certificate_pem: bytes
    ca_pem: bytes
    name: str


# --- the control stream


class Beat(msgspec.Struct, frozen=True):
    """A sign of life of a side that has nothing else to say. every_s: the pace that is kept."""

    every_s: float


class Hello(msgspec.Struct, frozen=True):
    """A device's first message on every stream. The defaults are what this version can do."""

    software: str  # name and version, for the operator
    profile_json: bytes  # common.plan.Profile
    encodings: tuple[str, ...] = SPOKEN
    inline_bytes: int = INLINE_BYTES  # most bytes of blobs that it accepts within one order
    protocol: int = PROTOCOL


class Progress(msgspec.Struct, frozen=True):
    """Progress of a device with its order. done: share of the work, 0 to 1."""

    order_id: str
    done: float


class Trouble(msgspec.Struct, frozen=True):
    """Report of a device that cannot carry out an order; without an order id, it takes no part in the run."""

    order_id: str
    reason: str


ExchangeName = Literal["keys", "shares", "masked", "survivors", "unmasking"]


class SecureMember(msgspec.Struct, frozen=True):
    """Facts of one device in a message of secure aggregation; what a message does not need is empty.

    Attributes:
        name: The device.
        mask_key: Public X25519 key, from which it agrees on masks with each other device.
        share_key: Public X25519 key, from which it agrees on keys for sealed shares.
        certificate: DER, of the key with which it signs.
        signature: ECDSA by that key: of its keys, or of the survivors.
        secret: A sealed pair of shares, or a share in the clear.
    """

    name: str
    mask_key: bytes = b""
    share_key: bytes = b""
    certificate: bytes = b""
    signature: bytes = b""
    secret: bytes = b""

    def __repr__(self) -> str:
        return f"SecureMember({self.name!r})"


class FixedSurvivors(msgspec.Struct, frozen=True):
    """Facts of an attempt of secure aggregation from which its sum can still be unmasked after a restart of the server.

    Attributes:
        threshold: How many devices must answer.
        members: The cohort with its keys.
        masked: The devices whose pair masks are in the updates.
        survivors: The devices whose updates are summed.
    """

    threshold: int
    members: tuple[SecureMember, ...]
    masked: tuple[str, ...]
    survivors: tuple[str, ...]


class SecureMessage(msgspec.Struct, frozen=True):
    """One message of secure aggregation, to a device or from it (attune.common.secure).

    Attributes:
        order_id: The device's order, whose update is summed.
        attempt: Counts the attempts of a round. Each has keys of its own.
        exchange: The exchange that it belongs to.
        members: The devices that it is about.
        threshold: How many devices must answer, so that a sum can be unmasked.
        refused: Why the device takes no part; empty: it does.
    """

    order_id: str
    attempt: int
    exchange: ExchangeName
    members: tuple[SecureMember, ...] = ()
    threshold: int = 0
    refused: str = ""

    @property
    def of_statistics(self) -> str:
        """The id of the question for statistics whose answers are summed; empty: the message is of a round."""
        return self.order_id.removeprefix(STATISTICS_ORDER) if self.order_id.startswith(STATISTICS_ORDER) else ""


class StatisticsRequest(msgspec.Struct, frozen=True):
    """Question for statistics of a device's data (attune.common.site_statistics).

    Attributes:
        id: Word that the report repeats.
        columns: Names of the columns that are meant; empty: all.
        centres_json: Centre of each column by name, for sketches; empty: the question is for sums.
        layout_json: MaskedLayout (attune.common.site_statistics) of a masked sum; empty: the question is for none.
        noisy_json: NoisyLayout (attune.common.site_statistics) of a noisy release; empty: the question is for none.
    """

    id: str
    columns: tuple[str, ...] = ()
    centres_json: bytes = b""
    layout_json: bytes = b""
    noisy_json: bytes = b""


class StatisticsReport(msgspec.Struct, frozen=True):
    """Answer of a device to a question for statistics.

    Attributes:
        id: Word of the question.
        report_json: SiteSums or SiteSketches, or NoisySums.
        refused: Why the device gives none; empty: it does.
        masked: The statistics as one masked number; empty: the device has none to send now.
    """

    id: str
    report_json: bytes = b""
    refused: str = ""
    masked: bytes = b""


class UnitReport(msgspec.Struct, frozen=True):
    """How a device's columns fit the ranges in the plan's schema: a UnitVerdict (common.schema) by column."""

    verdicts: Mapping[str, str]


class Description(msgspec.Struct, frozen=True):
    """Moments of a device's data, where embeddings start from descriptions; empty: the device says nothing."""

    moments: tuple[float, ...]  # common.models.feature_mean


class Welcome(msgspec.Struct, frozen=True):
    """The plan that the federation has fixed, and what the server accepts.

    waits: whether an update may be submitted before all its blobs have arrived.
    """

    plan_json: bytes  # common.plan.Plan
    inline_bytes: int = 0  # most bytes of blobs that the server accepts within one update
    waits: bool = False


class Notice(msgspec.Struct, frozen=True):
    """Message for the person at the device."""

    text: str


class Farewell(msgspec.Struct, frozen=True):
    """End of the run: the last state is durable and evaluated, so the device saves its model and disconnects."""

    text: str


ToDevice = Welcome | Notice | Order | Farewell | SecureMessage | StatisticsRequest
Answer = SecureMessage | StatisticsReport | UnitReport | Description  # of a device, to a question or to the plan
ToServer = Hello | Progress | Trouble | Answer


def read_profile(text: bytes, who: str) -> Profile:
    """Read what a device declares of its data.

    Raises:
        SettingError: It cannot be read.
    """
    try:
        return from_json(text, Profile)
    except msgspec.DecodeError as error:
        raise SettingError(f"{who} declared its data in a form that cannot be read: {clean(str(error))}") from None
