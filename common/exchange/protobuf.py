"""The only converter between the messages and protobuf: the calls of proto/attune/v1/federation.proto, with their codecs.

Text of a peer becomes one line of bounded length here. Kinds of messages that this version does not know are read as None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, cast

from attune.common.exchange.messages import (
    Beat,
    BlobRef,
    Description,
    DirectUpload,
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
    SignedUrl,
    StatisticsReport,
    StatisticsRequest,
    ToDevice,
    ToServer,
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
from attune.common.text import clean

SERVICES = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
LONGEST_SOFTWARE = 40  # characters
LONGEST_TROUBLE = 500  # characters of a reason that a device sends
_WORK: dict[WorkName, pb.Work] = {"train": pb.WORK_TRAIN, "evaluate": pb.WORK_EVALUATE}
_WORK_NAMES = {number: name for name, number in _WORK.items()}
_EXCHANGES: dict[ExchangeName, pb.SecureExchange] = {
    "keys": pb.SECURE_EXCHANGE_KEYS,
    "shares": pb.SECURE_EXCHANGE_SHARES,
    "masked": pb.SECURE_EXCHANGE_MASKED,
    "survivors": pb.SECURE_EXCHANGE_SURVIVORS,
    "unmasking": pb.SECURE_EXCHANGE_UNMASKING,
}
_EXCHANGE_NAMES = {number: name for name, number in _EXCHANGES.items()}


def _bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


# --- the control stream


def _device_message(message: ToServer | Beat) -> pb.DeviceMessage:
    match message:
        case Hello():
            return pb.DeviceMessage(hello=pb.Hello(**vars(message)))
        case Progress(order_id, done):
            return pb.DeviceMessage(progress=pb.Progress(order_id=order_id, done=done))
        case Trouble(order_id, reason):
            return pb.DeviceMessage(trouble=pb.Trouble(order_id=order_id, reason=reason[:LONGEST_TROUBLE]))
        case Beat(every_s):
            return pb.DeviceMessage(beat=pb.Beat(every_s=every_s))
        case SecureMessage():
            return pb.DeviceMessage(secure=_secure_message(message))
        case StatisticsReport(id, report_json, refused, masked):
            report = pb.StatisticsReport(id=id, report_json=report_json, refused=refused[:LONGEST_TROUBLE], masked=masked)
            return pb.DeviceMessage(statistics=report)
        case UnitReport(verdicts):
            return pb.DeviceMessage(units=pb.UnitReport(verdicts=verdicts))
        case Description(moments):
            return pb.DeviceMessage(description=pb.Description(moments=moments))


def _read_to_server(data: bytes) -> ToServer | Beat | None:
    message = pb.DeviceMessage.FromString(data)
    match message.WhichOneof("message"):
        case "hello":
            hello = message.hello
            software = clean(hello.software, LONGEST_SOFTWARE)
            return Hello(software, hello.profile_json, tuple(hello.encodings), hello.inline_bytes, hello.protocol)
        case "progress":
            return Progress(message.progress.order_id, message.progress.done)
        case "trouble":
            return Trouble(message.trouble.order_id, clean(message.trouble.reason))
        case "beat":
            return Beat(message.beat.every_s)
        case "secure" if message.secure.exchange in _EXCHANGE_NAMES:
            return _secure(message.secure)
        case "statistics":
            report = message.statistics
            return StatisticsReport(report.id, report.report_json, clean(report.refused, LONGEST_TROUBLE), report.masked)
        case "units":
            return UnitReport(dict(message.units.verdicts))
        case "description":
            return Description(tuple(message.description.moments[: MOST_MOMENTS + 1]))
    return None


def _server_message(message: ToDevice | Beat) -> pb.ServerMessage:
    match message:
        case Welcome():
            return pb.ServerMessage(welcome=pb.Welcome(**vars(message)))
        case Notice(text):
            return pb.ServerMessage(notice=pb.Notice(text=text))
        case Farewell(text):
            return pb.ServerMessage(finish=pb.Finish(message=text))
        case Beat(every_s):
            return pb.ServerMessage(beat=pb.Beat(every_s=every_s))
        case Order():
            return pb.ServerMessage(order=_order_message(message))
        case SecureMessage():
            return pb.ServerMessage(secure=_secure_message(message))
        case StatisticsRequest():
            return pb.ServerMessage(statistics=pb.StatisticsRequest(**vars(message)))


def _read_to_device(data: bytes) -> ToDevice | Beat | None:
    message = pb.ServerMessage.FromString(data)
    match message.WhichOneof("message"):
        case "welcome":
            welcome = message.welcome
            return Welcome(welcome.plan_json, welcome.inline_bytes, welcome.waits, clean(welcome.direct))
        case "notice":
            return Notice(clean(message.notice.text))
        case "finish":
            return Farewell(clean(message.finish.message))
        case "beat":
            return Beat(message.beat.every_s)
        case "order" if message.order.work in _WORK_NAMES:
            return _order(message.order)
        case "secure" if message.secure.exchange in _EXCHANGE_NAMES:
            return _secure(message.secure)
        case "statistics":
            question = message.statistics
            return StatisticsRequest(
                question.id, tuple(question.columns), question.centres_json, question.layout_json, question.noisy_json
            )
    return None


def _secure_message(message: SecureMessage) -> pb.SecureMessage:
    return pb.SecureMessage(
        order_id=message.order_id,
        attempt=message.attempt,
        exchange=_EXCHANGES[message.exchange],
        members=[pb.SecureMember(**vars(member)) for member in message.members],
        threshold=message.threshold,
        refused=message.refused[:LONGEST_TROUBLE],
    )


def _secure(message: pb.SecureMessage) -> SecureMessage:
    members = (
        SecureMember(clean(one.name), one.mask_key, one.share_key, one.certificate, one.signature, one.secret)
        for one in message.members[: MOST_MEMBERS + 1]  # one more, so that a longer list is seen to be too long
    )
    name = _EXCHANGE_NAMES[message.exchange]
    refused = clean(message.refused, LONGEST_TROUBLE)
    return SecureMessage(message.order_id, message.attempt, name, tuple(members), message.threshold, refused)


def _order_message(order: Order) -> pb.Order:
    return pb.Order(
        id=order.id,
        round=order.round,
        work=_WORK[order.work],
        downloads=_ref_messages(order.downloads),
        returns=[pb.Return(part=part, encoding=order.encodings.get(part, "")) for part in order.returns],
        deadline_s=order.deadline_s,
        trains=order.trains,
        cold_start=_ref_messages(order.cold_start),
        prior=dict[str, float](order.prior.items()),
        finish_epochs=order.finish_epochs,
        finish_stops=order.finish_stops,
        counted=dict[int, float](order.counted.items()),
    )


def _order(order: pb.Order) -> Order:
    return Order(
        id=order.id,
        round=order.round,
        work=_WORK_NAMES[order.work],
        downloads=_refs(order.downloads),
        returns=tuple(wanted.part for wanted in order.returns),
        cold_start=_refs(order.cold_start),
        trains=tuple(order.trains),
        deadline_s=order.deadline_s,
        encodings={wanted.part: wanted.encoding for wanted in order.returns if wanted.encoding},
        prior={name: share for name, share in order.prior.items() if is_model_name(name) and 0 < share <= 1},
        finish_epochs=order.finish_epochs,
        finish_stops=tuple(order.finish_stops),
        counted={number: weight for number, weight in order.counted.items() if 0 < weight < math.inf},
    )


def _ref_messages(refs: Iterable[BlobRef]) -> list[pb.BlobRef]:
    return [_ref_message(ref) for ref in refs]


def _ref_message(ref: BlobRef) -> pb.BlobRef:
    return pb.BlobRef(**vars(ref) | {"smaller": None if ref.smaller is None else _ref_message(ref.smaller)})


def _refs(refs: Iterable[pb.BlobRef]) -> tuple[BlobRef, ...]:
    return tuple(_ref(ref, _ref(ref.smaller) if ref.HasField("smaller") else None) for ref in refs)


def _ref(ref: pb.BlobRef, smaller: BlobRef | None = None) -> BlobRef:
    return BlobRef(ref.part, ref.digest, ref.size, ref.version, ref.encoding, ref.data, smaller, ref.base)


# --- updates


def _write_update(update: Update) -> bytes:
    parts, report = _ref_messages(update.parts), update.metrics_json
    return _bytes(
        pb.Update(order_id=update.order_id, parts=parts, samples=update.samples, metrics_json=report, attempt=update.attempt)
    )


def _read_update(data: bytes) -> Update:
    message = pb.Update.FromString(data)
    return Update(message.order_id, _refs(message.parts), message.samples, message.metrics_json or b"{}", message.attempt)


def _write_receipt(receipt: Receipt) -> bytes:
    status = pb.Receipt.STATUS_LATE if receipt.late else pb.Receipt.STATUS_ACCEPTED
    return _bytes(pb.Receipt(status=status, message=receipt.late))


def _read_receipt(data: bytes) -> Receipt | None:
    message = pb.Receipt.FromString(data)
    if message.status == pb.Receipt.STATUS_UNSPECIFIED:
        return None
    late = "" if message.status == pb.Receipt.STATUS_ACCEPTED else clean(message.message) or "its round is closed"
    return Receipt(late)


def _write_direct_upload(asked: DirectUpload) -> bytes:
    return _bytes(pb.DirectUpload(target=pb.UploadTarget(**vars(asked.target)), part_digests=asked.part_digests))


def _read_direct_upload(data: bytes) -> DirectUpload:
    message = pb.DirectUpload.FromString(data)
    sent = message.target
    target = UploadTarget(sent.order_id, sent.part, sent.digest, sent.size, sent.offset)
    return DirectUpload(target, tuple(message.part_digests))


# --- calls


@dataclass(frozen=True)
class Codec:
    """How one kind of message is written and read."""

    write: Callable[[Any], bytes]
    read: Callable[[bytes], Any]


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


def _alike(message_kind: Any, kind: Callable[..., Any]) -> Codec:
    """Return the codec of messages whose fields have the same names and values on both sides."""
    names = [field.name for field in fields(cast(Any, kind))]

    def write(message: Any) -> bytes:
        return _bytes(message_kind(**{name: getattr(message, name) for name in names}))

    def read(data: bytes) -> Any:
        message = message_kind.FromString(data)
        return kind(**{name: getattr(message, name) for name in names})

    return Codec(write, read)


def _only(message_kind: Any, name: str) -> Codec:
    """Return the codec of the value that is the only field of a message."""
    return Codec(lambda value: _bytes(message_kind(**{name: value})), lambda data: getattr(message_kind.FromString(data), name))


ENROL_REQUEST = _alike(pb.EnrolRequest, EnrolRequest)
RENEW_REQUEST = _only(pb.RenewRequest, "csr_der")
CERTIFICATE = _alike(pb.Certificate, IssuedCertificate)
TO_SERVER = Codec(lambda message: _bytes(_device_message(message)), _read_to_server)
TO_DEVICE = Codec(lambda message: _bytes(_server_message(message)), _read_to_device)
UPDATE = Codec(_write_update, _read_update)
RECEIPT = Codec(_write_receipt, _read_receipt)
DOWNLOAD_REQUEST = _alike(pb.DownloadRequest, DownloadRequest)
TARGET = _alike(pb.UploadTarget, UploadTarget)
DIRECT_UPLOAD = Codec(_write_direct_upload, _read_direct_upload)
SIGNED_URL = _alike(pb.SignedUrl, SignedUrl)
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
DOWNLOAD_URL = Call(BLOBS, "DownloadUrl", DOWNLOAD_REQUEST, SIGNED_URL)
UPLOAD_URL = Call(BLOBS, "UploadUrl", DIRECT_UPLOAD, SIGNED_URL)
UPLOAD_OFFSET = Call(BLOBS, "UploadOffset", TARGET, OFFSET)
