"""What both sides of the wire must spell alike and the .proto files cannot say (docs/protocol.md)."""

from __future__ import annotations

PROTOCOL = 1  # the version that `Hello.protocol` names
UPLOAD_KEY = "attune-upload-bin"  # the metadata key of an upload: which blob it is (UploadTarget, serialized)
