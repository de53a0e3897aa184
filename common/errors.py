"""One exception tree and its one mapping to gRPC status and exit codes.

Every error says what happened, to which device or file, and what to do next. `kind` travels in the trailing metadata of a
refused call, so the device raises the same error as the server did. `exit_code` is what a command ends with. `status` is the
name of the gRPC status (a name, so that importing this file does not import grpc).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from typing_extensions import Self


class AttuneError(Exception):
    """Error that Attune raises on purpose; its message is for a person."""

    kind = "error"
    exit_code = 1
    status = "INTERNAL"

    @classmethod
    def of_kind(cls, kind: str, message: str) -> Self | None:
        """Return this class's error if `kind` is its kind."""
        return cls(message) if kind == cls.kind else None


NEEDS_TORCH = "pip install 'attune-fl[train]'"


class SettingError(AttuneError):
    """A setting, flag, method or model is unknown or out of range.

    What to do: Use the name that the message suggests.
    """

    kind, exit_code, status = "setting", 2, "INVALID_ARGUMENT"


def needing(error: AttuneError | ModuleNotFoundError) -> AttuneError:
    """Return an error as one for people: of an import that an installation without torch cannot do, what to install.

    Raises:
        ModuleNotFoundError: Something else cannot be imported.
    """
    if isinstance(error, AttuneError):
        return error
    if (error.name or "").partition(".")[0] not in ("torch", "sklearn", "threadpoolctl"):
        raise error
    return SettingError(f"this needs {error.name}, and the installation is a light one: {NEEDS_TORCH}")


class PortInUse(AttuneError):
    """The port is in use, or `--host` is not an address of this machine.

    What to do: Stop the program that uses the port, or choose another `--port`.
    """

    kind, exit_code, status = "port-in-use", 3, "FAILED_PRECONDITION"


class HomeMismatch(AttuneError):
    """The home belongs to another federation or device, has other settings, or is damaged.

    What to do: Leave the flags out, use another `--home`, or restore what the message names.
    """

    kind, exit_code, status = "home-mismatch", 4, "FAILED_PRECONDITION"


class HomeBusy(AttuneError):
    """A live process already runs on this home.

    What to do: Stop it, or use another `--home`.
    """

    kind, exit_code, status = "home-busy", 5, "FAILED_PRECONDITION"


class ShardError(AttuneError):
    """The shard cannot be read, is empty, or has the wrong arrays.

    What to do: Read the message.
    """

    kind, exit_code, status = "shard", 6, "INVALID_ARGUMENT"


class NonFiniteFeatures(ShardError):
    """Features are NaN or infinite; the message names columns and counts.

    What to do: Fill them in, or leave the samples out.
    """

    kind, exit_code = "non-finite-features", 7


class UndeclaredLabels(ShardError):
    """Labels are outside the classes that the federation has fixed.

    What to do: Declare `classes` before round 1, or leave these samples out.
    """

    kind, exit_code = "undeclared-labels", 8


class ShapeMismatch(ShardError):
    """The data have another kind or shape than the federation's.

    What to do: Convert the shard.
    """

    kind, exit_code = "shape-mismatch", 9


class NameTaken(AttuneError):
    """Another device has this name.

    What to do: Choose a name with `--name`.
    """

    kind, exit_code, status = "name-taken", 10, "ALREADY_EXISTS"


class TokenRefused(AttuneError):
    """The join token is wrong, expired, used up or revoked.

    What to do: Ask the operator for a new one: `fedserver token`.
    """

    kind, exit_code, status = "token-refused", 11, "PERMISSION_DENIED"


class FingerprintMismatch(AttuneError):
    """The server has no certificate of the authority that this device trusts.

    What to do: Check `--server`, or ask the operator for a new token.
    """

    kind, exit_code, status = "fingerprint-mismatch", 12, "UNAUTHENTICATED"


class Unreachable(AttuneError):
    """No server answered within `--connect-timeout`, or a running server was not told of a written change.

    What to do: Check address, network and server.
    """

    kind, exit_code, status = "unreachable", 13, "UNAVAILABLE"


class CertificateRefused(AttuneError):
    """The device's certificate is revoked, expired, or of another federation.

    What to do: Expired: start once with a new token. Otherwise use a new home, a new token and another name.
    """

    kind, exit_code, status = "certificate-refused", 14, "UNAUTHENTICATED"


class NotEnrolled(AttuneError):
    """The device has no certificate, and no token to get one.

    What to do: Run `fedclient join` first.
    """

    kind, exit_code, status = "not-enrolled", 15, "UNAUTHENTICATED"


class Forbidden(AttuneError):
    """An authenticated peer asked for something that belongs to another.

    What to do: Find out which program has this certificate.
    """

    kind, exit_code, status = "forbidden", 16, "PERMISSION_DENIED"


class DiskFull(AttuneError):
    """The disk is full. Accepted updates are kept.

    What to do: Free some space, then start again.
    """

    kind, exit_code, status = "disk-full", 17, "RESOURCE_EXHAUSTED"


class FederationFailed(AttuneError):
    """The federation ended without a result.

    What to do: Read the message.
    """

    kind, exit_code, status = "federation-failed", 18, "ABORTED"


class NoModel(AttuneError):
    """The home has no finished model yet.

    What to do: Let the federation run first.
    """

    kind, exit_code, status = "no-model", 19, "NOT_FOUND"


class UnknownBlob(AttuneError):
    """The server does not offer this digest to this device, or not any more.

    What to do: Wait for the next order, or start again.
    """

    kind, exit_code, status = "unknown-blob", 20, "NOT_FOUND"


class OrderClosed(AttuneError):
    """The order is closed, so the result is late.

    What to do: Wait for the next order.
    """

    kind, exit_code, status = "order-closed", 23, "ABORTED"


class UploadBusy(AttuneError):
    """Another stream of the device has this upload open.

    What to do: Wait: the device tries again by itself.
    """

    kind, status = "upload-busy", "ABORTED"


class UploadTakenOver(AttuneError):
    """A newer stream of the device continues this upload. The bytes that arrived are kept.

    What to do: Wait: the newer stream continues.
    """

    kind, status = "upload-taken-over", "ABORTED"


class Stalled(AttuneError):
    """A transfer stood still for too long. The order is open, and the bytes that arrived are kept.

    What to do: Wait: the device continues by itself.
    """

    kind, status = "stalled", "ABORTED"


class Replaced(AttuneError):
    """Another stream was opened with this device's certificate.

    What to do: Stop one of the two processes with this identity.
    """

    kind, exit_code, status = "replaced", 24, "ABORTED"


class TooMany(AttuneError):
    """The device has asked for more, or more often, than one device may.

    What to do: Wait, then start again.
    """

    kind, exit_code, status = "too-many", 28, "RESOURCE_EXHAUSTED"


class LedgerBusy(Unreachable):
    """The database or the S3 store is locked or lost, the disk is full, or the server may open no more files.

    What to do: Stop the program that locks the database, start what is down, or make room. A running server tries again.

    Attributes:
        store: What cannot be used: "ledger" (the database) or "blobs" (the S3 store); empty: nothing that lasts.
    """

    kind, exit_code, status = "ledger-busy", 27, "UNAVAILABLE"

    def __init__(self, message: str, store: str = "ledger") -> None:
        super().__init__(message)
        self.store = store


class ServerReplaced(Unreachable):
    """Another server has taken over this federation, because this one did not answer for some seconds.

    What to do: Nothing. Started again, this one waits until it is needed.
    """

    kind, exit_code, status = "server-replaced", 29, "UNAVAILABLE"


class WireError(AttuneError):
    """Bytes are not what they claim to be; the malformed kinds below say how.

    What to do: Update the older side.
    """

    kind, exit_code, status = "wire", 21, "INVALID_ARGUMENT"


class LimitExceeded(WireError):
    """A peer sent or announced more than the limit.

    What to do: Read the log of that device.
    """

    kind, status = "limit-exceeded", "RESOURCE_EXHAUSTED"


class UpdateRefused(AttuneError):
    """The update does not fit its order: tensors, values, norm or samples.

    What to do: Read the message. The device waits for the next order.
    """

    kind, exit_code, status = "update-refused", 22, "INVALID_ARGUMENT"


def _tree(root: type[AttuneError]) -> Iterable[type[AttuneError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def from_kind(kind: str, message: str) -> AttuneError:
    """Return the error that a peer named by its kind. An unknown kind, of a newer peer, becomes an AttuneError."""
    errors = (cls.of_kind(kind, message) for cls in _tree(AttuneError))
    return next(filter(None, errors), AttuneError(message))


def together(errors: Mapping[str, Exception]) -> AttuneError:
    """Return one error for all these problems, each on a line that begins with its key. A single error stays as it is.

    Errors of one class become an error of this class. Errors about shards become a ShardError, others are of the first's class.
    """
    problems = [error if isinstance(error, AttuneError) else AttuneError(str(error)) for error in errors.values()]
    if len(problems) == 1:
        return problems[0]
    classes = {type(problem) for problem in problems}
    shards = len(classes) > 1 and all(issubclass(kind, ShardError) for kind in classes)
    kind = ShardError if shards else type(problems[0])
    return kind("\n".join([f"{len(problems)} problems:", *(f"{name}: {problem}" for name, problem in errors.items())]))


class Problems:
    """Errors of several steps that do not depend on each other, so that all are named at once."""

    def __init__(self) -> None:
        self._errors: list[AttuneError] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep an error of the block for later."""
        try:
            yield
        except AttuneError as error:
            self._errors.append(error)

    def check(self) -> None:
        """Check that there was no error.

        Raises:
            AttuneError: One for all that were collected, as in `together`.
        """
        if self._errors:
            raise together({str(number): error for number, error in enumerate(self._errors, 1)})


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return ` (did you mean X?)` with the choice closest to a misspelt word, or the list of choices if none is close."""
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(known)})"
