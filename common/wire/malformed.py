"""The ways in which bytes, headers and tensors can be malformed; `kind` is the name on the wire.

Three classes are caught by name, because a transfer can continue after them. Every other way is a kind of Malformed.
"""

from __future__ import annotations

from typing import Literal, get_args

from typing_extensions import Self

from attune.common.errors import LimitExceeded, WireError


class Truncated(WireError):
    """Fewer bytes than were announced. The bytes that arrived are good: send the rest."""

    kind = "truncated"


class DigestMismatch(WireError):
    """All bytes are there, but they are not the announced ones."""

    kind = "digest-mismatch"


class BadOffset(WireError):
    """An offset outside the blob."""

    kind = "bad-offset"


Kind = Literal[
    "bad-digest",  # not the algorithm and 64 lower-case hexadecimal digits
    "header-truncated",  # the blob ends before its header does
    "header-too-large",
    "header-not-json",  # not UTF-8, not JSON, or JSON that is not one object
    "header-too-deep",  # nested deeper than a safetensors header ever is
    "header-too-long",  # more members or numbers than the allowed number of tensors can need
    "duplicate-key",  # a key that occurs twice in one object: two readers could use different values
    "too-many-tensors",
    "bad-metadata",  # `__metadata__` is not an object of strings
    "bad-name",  # a tensor name that is empty, reserved, not valid Unicode, or carries control characters
    "name-too-long",
    "bad-entry",  # a tensor's entry is not an object of exactly dtype, shape and data_offsets
    "unknown-dtype",
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
    "bad-scale",  # of int8: NaN, infinite or negative
    "bad-frame",  # of zstd: it cannot be read, or holds another number of bytes than its tensor has
    "missing-tensor",
    "unexpected-tensor",
    "wrong-dtype",  # another than the manifest says
    "wrong-shape",  # another than the manifest says
    "unsupported-tensor",  # of this process, without bytes to write: sparse, quantised, on `meta`, or of a foreign dtype
    "put-twice",  # a tensor handed to a writer a second time
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
