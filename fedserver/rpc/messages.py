"""The server's messages as protobuf, and back: the only file of the server that knows both."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from attune.common.errors import SettingError
from attune.common.pb import federation_pb2 as pb
from attune.common.plan import Profile
from attune.common.text import clean, from_json
from attune.fedserver.core.messages import BlobRef, Farewell, Notice, Order, ToDevice, Update, Welcome

WORK = {"train": pb.WORK_TRAIN, "evaluate": pb.WORK_EVALUATE}


def encode(message: ToDevice) -> pb.ServerMessage:
    """What the server tells a device."""
    match message:
        case Welcome(plan, inline_bytes):
            welcome = pb.Welcome(plan_json=msgspec.json.encode(plan), inline_bytes=inline_bytes, waits=True)
            return pb.ServerMessage(welcome=welcome)
        case Notice(text):
            return pb.ServerMessage(notice=pb.Notice(text=text))
        case Farewell(text):
            return pb.ServerMessage(finish=pb.Finish(message=text))
        case Order():
            return pb.ServerMessage(order=_order(message))


def _order(order: Order) -> pb.Order:
    return pb.Order(
        id=str(order.id),
        round=order.id.round,
        work=WORK[order.id.work],
        downloads=_refs(order.downloads),
        returns=[pb.Return(part=part, encoding=order.encodings.get(part, "")) for part in order.returns],
        deadline_s=order.deadline_s,
        trains=order.trains,
        cold_start=_refs(order.cold_start),
        prior=dict[str, float](order.prior.items()),
    )


def _refs(refs: Iterable[BlobRef]) -> list[pb.BlobRef]:
    return [_ref(ref) for ref in refs]


def _ref(ref: BlobRef) -> pb.BlobRef:
    message = pb.BlobRef(
        part=ref.part,
        digest=ref.digest,
        size=ref.size,
        version=ref.version,
        encoding=ref.encoding,
        data=ref.data,
        base=ref.base,
    )
    if ref.smaller is not None:
        message.smaller.CopyFrom(_ref(ref.smaller))
    return message


def profile_of(hello: pb.Hello, name: str) -> Profile:
    """What a device declares of its data. Errors: SettingError."""
    try:
        return from_json(hello.profile_json, Profile)
    except msgspec.DecodeError as error:
        raise SettingError(f"{name} declared its data in a form that cannot be read: {clean(str(error))}") from None


def update_of(message: pb.Update) -> Update:
    """What a device hands in."""
    parts = tuple(BlobRef(ref.part, ref.digest, ref.size, ref.version, ref.encoding, ref.data) for ref in message.parts)
    return Update(message.order_id, parts, message.samples, message.metrics_json or b"{}")
