"""What both sides of the wire must spell alike and the .proto files cannot say (docs/protocol.md)."""

from __future__ import annotations

PROTOCOL = 1  # the version that `Hello.protocol` names
INLINE_BYTES = 1 << 20  # of blobs that one message may carry at most, whatever server.inline_bytes is
ENCODINGS = ("bf16", "int8")  # of parts, beside safetensors as it is: what each does is in attune.common.wire.encodings
RELATIVE = ("int8",)  # those of them that need something served, from which a change is written
UPLOAD_KEY = "attune-upload-bin"  # the metadata key of an upload: which blob it is (UploadTarget, serialized)
