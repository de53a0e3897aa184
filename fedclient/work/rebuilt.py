"""What was served in fewer bytes, as the value that it stands for, down to the last bit."""

from __future__ import annotations

from attune.common.errors import WireError
from attune.common.exchange.messages import BlobRef
from attune.common.wire.encodings import decoded
from attune.common.wire.files import digest_of_tensors
from attune.common.wire.header import Manifest
from attune.common.wire.tensors import Tensors, manifest_of
from attune.fedclient.messages import Unfit


def rebuilt(ref: BlobRef, expected: Manifest, fetched: Tensors, held: Tensors) -> Tensors:
    """The tensors of a part as they were served.

    fetched: those of the blob `ref.sent`. held: of the part, the value from which that may be the change.
    Errors: Unfit for what stands for another value, where that itself can be fetched; WireError else.
    """
    if not ref.sent.encoding:
        return fetched
    who = f"the part {ref.part} from the server"
    base = {name: tensor.detach().cpu() for name, tensor in held.items()} if ref.base else None
    try:
        value = dict(decoded(fetched, manifest_of(fetched), ref.sent.encoding, expected, base, who))
    except WireError as error:
        if ref.smaller is None:
            raise
        raise Unfit(str(error)) from error
    if ref.smaller is not None and digest_of_tensors(value) != ref.digest:
        raise Unfit(f"{who}, sent in fewer bytes, comes to other bytes than those of {ref.digest[:20]}")
    return value
