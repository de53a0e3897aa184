"""One exception tree and its one mapping to gRPC status and exit codes.

Every error says what happened, to which device or file, and what to do next. `kind` travels in the trailing metadata of a
refused call, so the device raises the same error as the server did. `exit_code` is what a command ends with. `status` is the
name of the gRPC status (a name, so that importing this file does not import grpc).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from typing_extensions import Self


class AttuneError(Exception):
    """Base of every error that Attune raises on purpose. The message is for a person."""

    kind = "error"
    exit_code = 1
    status = "INTERNAL"

    @classmethod
    def of_kind(cls, kind: str, message: str) -> Self | None:
        """This class's error, if `kind` names it."""
        return cls(message) if kind == cls.kind else None


class SettingError(AttuneError):
    """A setting, flag, method or model that is unknown or out of range."""

    kind, exit_code, status = "setting", 2, "INVALID_ARGUMENT"


class PortInUse(AttuneError):
    kind, exit_code, status = "port-in-use", 3, "FAILED_PRECONDITION"


class HomeMismatch(AttuneError):
    """The home belongs to another federation, or its recorded settings contradict the flags."""

    kind, exit_code, status = "home-mismatch", 4, "FAILED_PRECONDITION"


class HomeBusy(AttuneError):
    """A live process already runs on this home."""

    kind, exit_code, status = "home-busy", 5, "FAILED_PRECONDITION"


class ShardError(AttuneError):
    """A shard that cannot be read, is empty, or has the wrong arrays."""

    kind, exit_code, status = "shard", 6, "INVALID_ARGUMENT"


class NonFiniteFeatures(ShardError):
    kind, exit_code = "non-finite-features", 7


class UndeclaredLabels(ShardError):
    """Labels outside the classes the federation has fixed."""

    kind, exit_code = "undeclared-labels", 8


class ShapeMismatch(ShardError):
    """A shard whose kind or shape differs from the federation's."""

    kind, exit_code = "shape-mismatch", 9


class NameTaken(AttuneError):
    kind, exit_code, status = "name-taken", 10, "ALREADY_EXISTS"


class TokenRefused(AttuneError):
    """A join token that is wrong, expired, used up or revoked."""

    kind, exit_code, status = "token-refused", 11, "PERMISSION_DENIED"


class FingerprintMismatch(AttuneError):
    """The server does not hold a certificate of the CA that the token or the enrolment pinned."""

    kind, exit_code, status = "fingerprint-mismatch", 12, "UNAUTHENTICATED"


class Unreachable(AttuneError):
    """Nobody answered within the connect timeout."""

    kind, exit_code, status = "unreachable", 13, "UNAVAILABLE"


class CertificateRefused(AttuneError):
    """This device's certificate is revoked, expired, or of another federation."""

    kind, exit_code, status = "certificate-refused", 14, "UNAUTHENTICATED"


class NotEnrolled(AttuneError):
    """No certificate, and no token to get one."""

    kind, exit_code, status = "not-enrolled", 15, "UNAUTHENTICATED"


class Forbidden(AttuneError):
    """An authenticated peer asked for something that belongs to another."""

    kind, exit_code, status = "forbidden", 16, "PERMISSION_DENIED"


class DiskFull(AttuneError):
    kind, exit_code, status = "disk-full", 17, "RESOURCE_EXHAUSTED"


class FederationFailed(AttuneError):
    """The federation ended without a result."""

    kind, exit_code, status = "federation-failed", 18, "ABORTED"


class NoModel(AttuneError):
    """The home holds no finished model yet."""

    kind, exit_code, status = "no-model", 19, "NOT_FOUND"


class UnknownBlob(AttuneError):
    """A digest that the server does not (or no longer) offer to this device."""

    kind, exit_code, status = "unknown-blob", 20, "NOT_FOUND"


class OrderClosed(AttuneError):
    """The order is closed: the result is late, and nothing is wrong."""

    kind, exit_code, status = "order-closed", 23, "ABORTED"


class UploadBusy(AttuneError):
    """Another stream has this upload open: it must be closed before the new stream's is opened."""

    kind, status = "upload-busy", "ABORTED"


class UploadTakenOver(AttuneError):
    """A newer stream of the same device goes on with this upload: the order is open, and the bytes that came are kept."""

    kind, status = "upload-taken-over", "ABORTED"


class Stalled(AttuneError):
    """Nothing came on an upload for too long: the order is open, and the upload goes on at the bytes that came."""

    kind, status = "stalled", "ABORTED"


class Replaced(AttuneError):
    """Another stream was opened with this device's certificate: a device is one process at a time."""

    kind, exit_code, status = "replaced", 24, "ABORTED"


class TooMany(AttuneError):
    """This device has asked for more, or more often, than one device may. The same call may succeed later."""

    kind, exit_code, status = "too-many", 28, "RESOURCE_EXHAUSTED"


class LedgerBusy(Unreachable):
    """The server lacks something for the moment: its database is locked, its disk is full, or it may open no more files.

    The same call may succeed later.
    """

    kind, exit_code, status = "ledger-busy", 27, "UNAVAILABLE"


class WireError(AttuneError):
    """Bytes that are not what they claim to be; common/wire/malformed.py names each way."""

    kind, exit_code, status = "wire", 21, "INVALID_ARGUMENT"


class LimitExceeded(WireError):
    """A peer sent, or announced, more than the limit."""

    kind, status = "limit-exceeded", "RESOURCE_EXHAUSTED"


class UpdateRefused(AttuneError):
    """An update that does not fit its order: wrong tensors, not finite, too large a norm, too many samples."""

    kind, exit_code, status = "update-refused", 22, "INVALID_ARGUMENT"


def _tree(root: type[AttuneError]) -> Iterable[type[AttuneError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def from_kind(kind: str, message: str) -> AttuneError:
    """The error that a peer named by `kind`; an unknown kind (a newer peer's) becomes the base class."""
    found = (cls.of_kind(kind, message) for cls in _tree(AttuneError))
    return next(filter(None, found), AttuneError(message))


def nearest(word: str, choices: Iterable[str]) -> str:
    """` (did you mean X?)` for the choice closest to a misspelt word, or the list of choices if none is close."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(known)})"
