"""Errors for malformed bytes, headers and tensors; `kind` is the name on the wire.

Three classes are caught by name, because a transfer can continue after them. All other errors are kinds of Malformed.
"""

from __future__ import annotations

from typing import Literal, get_args

from typing_extensions import Self

from attune.common.errors import LimitExceeded, WireError


class Truncated(WireError):
    """Fewer bytes arrived than were announced. The bytes that arrived are good.

    What to do: Send the rest.
    """

    kind = "truncated"


class DigestMismatch(WireError):
    """All bytes arrived, but they are not the announced ones.

    What to do: Send them again.
    """

    kind = "digest-mismatch"


class BadOffset(WireError):
    """The offset is outside the blob.

    What to do: Update the older side.
    """

    kind = "bad-offset"


Kind = Literal[
    "bad-digest",  # not the algorithm and 64 lower-case hexadecimal digits
    "header-truncated",  # the blob ends before its header does
    "header-too-large",  # over 16 MiB
    "header-not-json",  # not UTF-8, not JSON, or JSON that is not one object
    "header-too-deep",  # nested deeper than a safetensors header ever is
    "header-too-long",  # more members or numbers than the allowed number of tensors can need
    "duplicate-key",  # a key that occurs twice in one object: two readers could use different values
    "too-many-tensors",  # over 65,536
    "bad-metadata",  # `__metadata__` is not an object of strings
    "bad-name",  # a tensor name that is empty, reserved, not valid Unicode, or carries control characters
    "name-too-long",  # a tensor name over 512 bytes
    "bad-entry",  # a tensor's entry is not an object of exactly dtype, shape and data_offsets
    "unknown-dtype",  # a dtype that is not supported
    "bad-shape",  # not a list of whole numbers >= 0
    "shape-too-large",  # too many dimensions, or more elements than 63 bits count
    "bad-offsets",  # not two whole numbers >= 0 in ascending order
    "size-mismatch",  # the offsets hold another number of bytes than shape and dtype need
    "misaligned",  # a tensor does not start at a multiple of its element size, so it could not be used where it lies
    "overlap",  # two tensors claim the same bytes
    "gap",  # bytes between two tensors that belong to no tensor
    "out-of-range",  # a tensor ends behind the end of the blob
    "trailing-bytes",  # bytes behind the last tensor
    "not-boolean",  # a BOOL tensor with a byte other than 0 and 1, on which torch's operations would disagree
    "not-finite",  # NaN or infinite values
    "bad-scale",  # a scale of int8 that is NaN, infinite or negative
    "bad-frame",  # a frame of zstd that cannot be read, or holds another number of bytes than its tensor has
    "missing-tensor",  # a tensor that the receiver expects
    "unexpected-tensor",  # a tensor that the receiver does not expect
    "wrong-dtype",  # another dtype than the manifest says
    "wrong-shape",  # another shape than the manifest says
    "unsupported-tensor",  # in this process: a tensor without bytes to write (sparse, quantised, on `meta`, a foreign dtype)
    "put-twice",  # in this process: a tensor handed to a writer a second time
]
KINDS: tuple[Kind, ...] = get_args(Kind)
TOO_MUCH: frozenset[Kind] = frozenset(
    {"header-too-large", "header-too-long", "too-many-tensors", "name-too-long", "shape-too-large"}
)


class Malformed(WireError):
    """Bytes or tensors that are wrong in the way that `kind` says. Kinds in TOO_MUCH have the status of LimitExceeded."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        if kind in TOO_MUCH:
            self.status = LimitExceeded.status

    @classmethod
    def of_kind(cls, kind: str, message: str) -> Self | None:
        return cls(kind, message) if kind in KINDS else None
