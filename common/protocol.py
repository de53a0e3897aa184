"""What both sides of the wire must spell alike and the .proto files cannot say (docs/protocol.md)."""

from __future__ import annotations

from importlib.util import find_spec

PROTOCOL = 1  # the version that `Hello.protocol` names
INLINE_BYTES = 1 << 20  # of blobs that one message may carry at most, whatever server.inline_bytes is
EXTRAS = {"zstd": "zstandard"}  # encodings that need a package which need not be there
# Of parts, beside safetensors as it is: what each does is in attune.common.wire.encodings.
ENCODINGS = ("bf16", "int8", *(name for name, package in EXTRAS.items() if find_spec(package)))
RELATIVE = ("int8",)  # those of them that need something served, from which a change is written
PACKED = "zstd"  # the one in which what is served is sent, where it is smaller
PER_PART = "per-part"  # whoever says this writes each part in the encoding that is asked for it, others all in one
CHANGE = "change"  # whoever says this takes what is served as its change from what it holds (BlobRef.smaller)
SPOKEN = (*ENCODINGS, PER_PART, *([CHANGE] if PACKED in ENCODINGS else []))  # what Hello.encodings lists
UPLOAD_KEY = "attune-upload-bin"  # the metadata key of an upload: which blob it is (UploadTarget, serialized)
