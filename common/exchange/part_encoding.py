"""The encodings of a part as the transform that is nearest to the wire: written on the device, read on arrival."""

from __future__ import annotations

from dataclasses import replace

from attune.common.exchange.transform import ArrivalContext, DeviceContext, PartUpdate, Unchanged
from attune.common.wire.encodings import AS_THEY_LIE, decoded, encode


class PartEncoding(Unchanged):
    """Write a part as its order asks: bf16, int8 with error feedback, zstd (attune.common.wire.encodings), or plain."""

    name = "encoding"

    def on_device(self, update: PartUpdate, context: DeviceContext) -> PartUpdate:
        base = None if context.change else context.before
        written = encode(update.tensors, context.encoding, base, context.owed)
        context.errors |= written.errors
        return replace(update, tensors=written.tensors)

    def on_arrival(self, update: PartUpdate, context: ArrivalContext) -> PartUpdate:
        """Return the values. What is read as it lies in its blob stays: its dtypes are checked with its shapes."""
        if context.encoding in AS_THEY_LIE:
            return update
        written, base = update.source, context.before if context.served else None
        return replace(
            update, tensors=decoded(written, written.manifest, context.encoding, context.manifest, base, context.who)
        )
