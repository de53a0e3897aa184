"""The device's messages as protobuf, and back."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from attune.common.metrics import CHOICES
from attune.common.pb import federation_pb2 as pb
from attune.common.text import clean
from attune.fedclient import messages


def event_of(message: pb.ServerMessage) -> messages.Event | None:
    """None for what is no event: a beat, or a kind of message that a newer server may send."""
    match message.WhichOneof("message"):
        case "welcome":
            return messages.Welcomed(message.welcome.plan_json)
        case "notice":
            return messages.Noticed(clean(message.notice.text))
        case "order":
            return _ordered(message.order)
        case "finish":
            return messages.Finished(clean(message.finish.message))
    return None


def _ordered(order: pb.Order) -> messages.Ordered | None:
    if order.work not in (pb.WORK_TRAIN, pb.WORK_EVALUATE):
        return None
    return messages.Ordered(
        messages.Order(
            id=order.id,
            round=order.round,
            train=order.work == pb.WORK_TRAIN,
            downloads=_refs(order.downloads),
            returns=tuple(each.part for each in order.returns),
            cold_start=_refs(order.cold_start),
            trains=tuple(order.trains),
            deadline_s=order.deadline_s,
            encodings={each.part: each.encoding for each in order.returns if each.encoding},
            prior={model: order.prior[model] for model in CHOICES if 0 < order.prior.get(model, 0) <= 1},
        )
    )


def _refs(refs: Iterable[pb.BlobRef]) -> tuple[messages.BlobRef, ...]:
    return tuple(_ref(ref, _ref(ref.smaller) if ref.HasField("smaller") else None) for ref in refs)


def _ref(ref: pb.BlobRef, smaller: messages.BlobRef | None = None) -> messages.BlobRef:
    return messages.BlobRef(ref.part, ref.digest, ref.size, ref.version, ref.data, ref.encoding, smaller, ref.base)


def target_message(target: messages.UploadTarget) -> pb.UploadTarget:
    return pb.UploadTarget(
        order_id=target.order_id, part=target.part, digest=target.digest, size=target.size, offset=target.offset
    )


def update_message(update: messages.Update) -> pb.Update:
    parts = [
        pb.BlobRef(part=r.part, digest=r.digest, size=r.size, version=r.version, encoding=r.encoding, data=r.data)
        for r in update.parts
    ]
    metrics = msgspec.json.encode(update.metrics)
    return pb.Update(order_id=update.order_id, parts=parts, samples=update.samples, metrics_json=metrics)
