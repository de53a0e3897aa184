"""The only converter between the messages and protobuf: the calls of proto/attune/v1/federation.proto, with their codecs.

Text of a peer becomes one line of bounded length here. Kinds of messages that this version does not know are read as None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from attune.common.exchange.messages import (
    Beat,
    BlobRef,
    Description,
    DownloadRequest,
    EnrolRequest,
    ExchangeName,
    Farewell,
    Hello,
    IssuedCertificate,
    Notice,
    Order,
    Progress,
    Receipt,
    SecureMember,
    SecureMessage,
    StatisticsReport,
    StatisticsRequest,
    Trouble,
    UnitReport,
    Update,
    UploadTarget,
    Welcome,
    WorkName,
)
from attune.common.metrics import is_model_name
from attune.common.pb import federation_pb2 as pb
from attune.common.protocol import MOST_MEMBERS, MOST_MOMENTS
from attune.common.text import LONGEST, clean

SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
LONGEST_SOFTWARE = 40  # characters
LONGEST_TROUBLE = 500  # characters of a reason that a device sends
_WORK: dict[WorkName, pb.Work] = {"train": pb.WORK_TRAIN, "evaluate": pb.WORK_EVALUATE}
_EXCHANGES: dict[ExchangeName, pb.SecureExchange] = {
    "keys": pb.SECURE_EXCHANGE_KEYS,
    "shares": pb.SECURE_EXCHANGE_SHARES,
    "masked": pb.SECURE_EXCHANGE_MASKED,
    "survivors": pb.SECURE_EXCHANGE_SURVIVORS,
    "unmasking": pb.SECURE_EXCHANGE_UNMASKING,
}


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


@dataclass(frozen=True)
class Codec:
    """How one kind of message is written and read."""

    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


@dataclass(frozen=True)
class Shape:
    """One kind of message, whose fields have the same names here and in protobuf.

    Attributes:
        proto: Its kind in protobuf.
        kind: Its kind here.
        texts: The peer's texts by field, and how many characters of each are read.
        names: Fields whose values are names here and numbers in protobuf.
        nested: Fields that hold messages.
        most: How many items of a list are read; the list is one longer than allowed, so that it is seen to be too long.
        apart: Fields that are written and read elsewhere.
    """

    proto: Any
    kind: Any
    texts: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, Mapping[Any, int]] = field(default_factory=dict)
    nested: Mapping[str, Shape] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    apart: Collection[str] = ()

    @cached_property
    def _fields(self) -> list[str]:
        return [name for name in self.kind.__struct_fields__ if name not in self.apart]

    def written(self, message: Any, **more: Any) -> Any:
        """Return the message as protobuf has it; `more`: the fields apart."""
        return self.proto(**{name: self._written(name, getattr(message, name)) for name in self._fields}, **more)

    def _written(self, name: str, value: Any) -> Any:
        if name in self.names:
            return self.names[name][value]
        if name in self.nested and value is not None:
            shape = self.nested[name]
            return [*map(shape.written, value)] if isinstance(value, tuple) else shape.written(value)
        return value[:LONGEST_TROUBLE] if name in ("reason", "refused") else value

    def read(self, message: Any, **more: Any) -> Any:
        """Return the message of protobuf as it is here; None: one of its names is not known. `more`: the fields apart."""
        values = {name: self._read(name, message) for name in self._fields}
        return None if None in (values[name] for name in self.names) else self.kind(**values, **more)

    def _read(self, name: str, message: Any) -> Any:
        value = getattr(message, name)
        if name in self.names:
            return next((word for word, number in self.names[name].items() if number == value), None)
        if name in self.texts:
            return clean(value, self.texts[name])
        if isinstance(value, (str, bytes, int, float)):
            return value
        if isinstance(value, Mapping):
            return dict(value)
        if not isinstance(value, Sequence):
            return self.nested[name].read(value) if message.HasField(name) else None
        items = value[: self.most[name]] if name in self.most else value
        return tuple(map(self.nested[name].read, items)) if name in self.nested else tuple(items)

    @property
    def codec(self) -> Codec:
        """The codec of messages of this kind alone."""
        return Codec(lambda message: _bytes(self.written(message)), lambda data: self.read(self.proto.FromString(data)))


def _stream(kind: Any, shapes: Mapping[str, Shape]) -> Codec:
    """Return the codec of one direction of the control stream, whose messages are one of these fields."""
    names = {shape.kind: name for name, shape in shapes.items()}

    def write(message: Any) -> bytes:
        name = names[type(message)]
        return _bytes(kind(**{name: shapes[name].written(message)}))

    def read(data: bytes) -> Any:
        message = kind.FromString(data)
        name = message.WhichOneof("message")
        return shapes[name].read(getattr(message, name)) if name in shapes else None

    return Codec(write, read)


class OrderShape(Shape):
    """Orders, in which a part to hand in stands beside its encoding. Shares and weights that cannot be are left out."""

    def written(self, message: Any, **more: Any) -> Any:
        returns = [pb.Return(part=part, encoding=message.encodings.get(part, "")) for part in message.returns]
        return super().written(message, returns=returns, prior=dict(message.prior), counted=dict(message.counted))

    def read(self, message: Any, **more: Any) -> Any:
        return super().read(
            message,
            returns=tuple(wanted.part for wanted in message.returns),
            encodings={wanted.part: wanted.encoding for wanted in message.returns if wanted.encoding},
            prior={name: share for name, share in message.prior.items() if is_model_name(name) and 0 < share <= 1},
            counted={number: weight for number, weight in message.counted.items() if 0 < weight < math.inf},
        )


class FarewellShape(Shape):
    """Farewells, whose text has another name in protobuf."""

    def written(self, message: Any, **more: Any) -> Any:
        return pb.Finish(message=message.text)

    def read(self, message: Any, **more: Any) -> Any:
        return Farewell(clean(message.message))


_REF = Shape(pb.BlobRef, BlobRef, nested={"smaller": Shape(pb.BlobRef, BlobRef, apart=["smaller"])})
_BEAT = Shape(pb.Beat, Beat)
_SECURE = Shape(
    pb.SecureMessage,
    SecureMessage,
    texts={"refused": LONGEST_TROUBLE},
    names={"exchange": _EXCHANGES},
    nested={"members": Shape(pb.SecureMember, SecureMember, texts={"name": LONGEST})},
    most={"members": MOST_MEMBERS + 1},
)
_TO_SERVER = {
    "hello": Shape(pb.Hello, Hello, texts={"software": LONGEST_SOFTWARE}),
    "progress": Shape(pb.Progress, Progress),
    "trouble": Shape(pb.Trouble, Trouble, texts={"reason": LONGEST}),
    "beat": _BEAT,
    "secure": _SECURE,
    "statistics": Shape(pb.StatisticsReport, StatisticsReport, texts={"refused": LONGEST_TROUBLE}),
    "units": Shape(pb.UnitReport, UnitReport),
    "description": Shape(pb.Description, Description, most={"moments": MOST_MOMENTS + 1}),
}
_TO_DEVICE = {
    "welcome": Shape(pb.Welcome, Welcome),
    "notice": Shape(pb.Notice, Notice, texts={"text": LONGEST}),
    "finish": FarewellShape(pb.Finish, Farewell),
    "beat": _BEAT,
    "order": OrderShape(
        pb.Order,
        Order,
        names={"work": _WORK},
        nested={"downloads": _REF, "cold_start": _REF},
        apart=["returns", "encodings", "prior", "counted"],
    ),
    "secure": _SECURE,
    "statistics": Shape(pb.StatisticsRequest, StatisticsRequest),
}
_UPDATE = Shape(pb.Update, Update, nested={"parts": _REF})
_TARGET = Shape(pb.UploadTarget, UploadTarget)


def _read_update(data: bytes) -> Update:
    update: Update = _UPDATE.read(pb.Update.FromString(data))
    return update if update.metrics_json else replace(update, metrics_json=b"{}")


def _write_receipt(receipt: Receipt) -> bytes:
    status = pb.Receipt.STATUS_LATE if receipt.late else pb.Receipt.STATUS_ACCEPTED
    return _bytes(pb.Receipt(status=status, message=receipt.late))


def _read_receipt(data: bytes) -> Receipt | None:
    message = pb.Receipt.FromString(data)
    if message.status == pb.Receipt.STATUS_UNSPECIFIED:
        return None
    late = "" if message.status == pb.Receipt.STATUS_ACCEPTED else clean(message.message) or "its round is closed"
    return Receipt(late)


# --- calls


@dataclass(frozen=True)
class Call:
    """One call of the contract, for the side that makes it and for the side that answers it."""

    service: str
    name: str
    request: Codec
    reply: Codec

    @property
    def path(self) -> str:
        """The name that gRPC knows it by."""
        return f"/{self.service}/{self.name}"


def _only(message_kind: Any, name: str) -> Codec:
    """Return the codec of the value that is the only field of a message."""
    return Codec(lambda value: _bytes(message_kind(**{name: value})), lambda data: getattr(message_kind.FromString(data), name))


ENROL_REQUEST = Shape(pb.EnrolRequest, EnrolRequest).codec
RENEW_REQUEST = _only(pb.RenewRequest, "csr_der")
CERTIFICATE = Shape(pb.Certificate, IssuedCertificate).codec
TO_SERVER = _stream(pb.DeviceMessage, _TO_SERVER)
TO_DEVICE = _stream(pb.ServerMessage, _TO_DEVICE)
UPDATE = Codec(_UPDATE.codec.write, _read_update)
RECEIPT = Codec(_write_receipt, _read_receipt)
DOWNLOAD_REQUEST = Shape(pb.DownloadRequest, DownloadRequest).codec
TARGET = _TARGET.codec
RECEIVED = _only(pb.UploadReply, "received")
OFFSET = _only(pb.UploadOffsetReply, "offset")
FRAMES = Codec(bytes, bytes)

FEDERATION, BLOBS = "attune.v1.Federation", "attune.v1.Blobs"
ENROL = Call(FEDERATION, "Enrol", ENROL_REQUEST, CERTIFICATE)
RENEW = Call(FEDERATION, "Renew", RENEW_REQUEST, CERTIFICATE)
CONNECT = Call(FEDERATION, "Connect", TO_SERVER, TO_DEVICE)
SUBMIT = Call(FEDERATION, "Submit", UPDATE, RECEIPT)
DOWNLOAD = Call(BLOBS, "Download", DOWNLOAD_REQUEST, FRAMES)
UPLOAD = Call(BLOBS, "Upload", FRAMES, RECEIVED)
UPLOAD_OFFSET = Call(BLOBS, "UploadOffset", TARGET, OFFSET)
