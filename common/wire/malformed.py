"""One named error for each way in which bytes, headers and tensors can be malformed; `kind` is the name on the wire."""

from __future__ import annotations

from attune.common.errors import LimitExceeded, WireError


class Truncated(WireError):
    """Fewer bytes than were announced. What has arrived is good: send the rest."""

    kind = "truncated"


class BadDigest(WireError):
    """A digest that is not 64 lower-case hexadecimal digits."""

    kind = "bad-digest"


class DigestMismatch(WireError):
    """All bytes are there, and they are not the ones that were announced."""

    kind = "digest-mismatch"


class BadOffset(WireError):
    """A place to go on from that lies outside the blob."""

    kind = "bad-offset"


class HeaderTruncated(WireError):
    """The blob ends before its header does."""

    kind = "header-truncated"


class HeaderTooLarge(LimitExceeded):
    kind = "header-too-large"


class HeaderNotJson(WireError):
    """Not UTF-8, not JSON, or JSON that is not one object."""

    kind = "header-not-json"


class HeaderTooDeep(WireError):
    """Nested deeper than a safetensors header ever is."""

    kind = "header-too-deep"


class HeaderTooLong(LimitExceeded):
    """More members or numbers than the allowed number of tensors can need."""

    kind = "header-too-long"


class DuplicateKey(WireError):
    """A key that occurs twice in one object: two readers could each believe another one."""

    kind = "duplicate-key"


class TooManyTensors(LimitExceeded):
    kind = "too-many-tensors"


class BadMetadata(WireError):
    """`__metadata__` is not an object of strings."""

    kind = "bad-metadata"


class BadName(WireError):
    """A tensor name that is empty, reserved, not valid Unicode, or carries control characters."""

    kind = "bad-name"


class NameTooLong(LimitExceeded):
    kind = "name-too-long"


class BadEntry(WireError):
    """A tensor's entry is not an object of exactly dtype, shape and data_offsets."""

    kind = "bad-entry"


class UnknownDtype(WireError):
    kind = "unknown-dtype"


class BadShape(WireError):
    """A shape that is not a list of whole numbers >= 0."""

    kind = "bad-shape"


class ShapeTooLarge(LimitExceeded):
    """Too many dimensions, or more elements than 63 bits count."""

    kind = "shape-too-large"


class BadOffsets(WireError):
    """Offsets that are not two whole numbers >= 0 in ascending order."""

    kind = "bad-offsets"


class SizeMismatch(WireError):
    """The offsets hold another number of bytes than shape and dtype need."""

    kind = "size-mismatch"


class Misaligned(WireError):
    """A tensor that does not start at a multiple of its element size, so it could not be used where it lies."""

    kind = "misaligned"


class Overlap(WireError):
    """Two tensors claim the same bytes."""

    kind = "overlap"


class Gap(WireError):
    """Bytes between two tensors that belong to none: a place to hide something."""

    kind = "gap"


class OutOfRange(WireError):
    """A tensor ends behind the end of the blob."""

    kind = "out-of-range"


class TrailingBytes(WireError):
    """Bytes behind the last tensor."""

    kind = "trailing-bytes"


class NotBoolean(WireError):
    """A BOOL tensor with a byte other than 0 and 1, on which torch's operations would disagree."""

    kind = "not-boolean"


class NotFinite(WireError):
    """NaN or infinite values."""

    kind = "not-finite"


class MissingTensor(WireError):
    kind = "missing-tensor"


class UnexpectedTensor(WireError):
    kind = "unexpected-tensor"


class WrongDtype(WireError):
    """Another dtype than the manifest says."""

    kind = "wrong-dtype"


class WrongShape(WireError):
    """Another shape than the manifest says."""

    kind = "wrong-shape"


class UnsupportedTensor(WireError):
    """A tensor of this process that has no bytes to write: sparse, quantised, on `meta`, or of a dtype the format lacks."""

    kind = "unsupported-tensor"


class PutTwice(WireError):
    """A tensor handed to a writer a second time."""

    kind = "put-twice"
