"""Advice to the operator about a refused device, by the kind of the refusal, and errors as devices may see them."""

from __future__ import annotations

import re

from attune.common.errors import AttuneError, DiskFull, HomeMismatch

_FOLDERS = re.compile(r"(?<![\w/.:])/(?=\S)(?:[^/:'\"]{1,255}/)+")  # of an absolute path; names may have spaces

HANDSHAKE = "handshake"  # the kind of a connection that never came to a call
OTHERWISE = "read the reason; if the device should not be here, revoke it: `fedserver revoke NAME`"
BY_KIND = {
    "certificate-refused": (
        "nothing if you revoked it; if its certificate has expired: `fedserver token --for NAME`, start it with --token-file"
    ),
    "forbidden": "find out which program has this certificate: it is no device's here, or it asked for another device's data",
    "token-refused": "if the device should join: `fedserver token` makes a new one, `fedserver token list` shows the old ones",
    "name-taken": "start the device with another --name; if it lost its home, its old name stays taken",
    "request-refused": "update that device's software",
    "setting": "compare that device's software and data with the federation's; the reason says what differs",
    "shape-mismatch": "convert that device's data to the federation's kind and shape, or leave it out",
    "undeclared-labels": "declare all classes before round 1 (data.classes), or relabel that device's data",
    "update-refused": "read that device's log; an impossible update comes from other software, or from an attacker",
    "limit-exceeded": "read that device's log; a device of this version never exceeds the limits",
    "too-many": "a device of this version never asks so often: read its log, or revoke it",
    "error": "this is a fault of the server: its log has the details; report it",
    "wire": "update that device's software; if it has the same version as here, check its disk",
    HANDSHAKE: (
        "a device with an expired certificate or token is refused here: `fedserver status` names the expired certificates; if "
        "it is not a device of yours, close the port to that address"
    ),
}
# Refusals that honest devices meet in everyday work. They are retried or resolved without the operator.
ORDINARY = frozenset(
    {
        "order-closed",
        "upload-busy",
        "upload-taken-over",
        "stalled",
        "replaced",
        "ledger-busy",
        "disk-full",
        "unknown-blob",
        "unreachable",
    }
)


def for_devices(error: AttuneError) -> AttuneError:
    """Return the error without the folders of this machine."""
    if isinstance(error, DiskFull):
        return type(error)("the disk of the server is full: its operator is told; try again later")
    if isinstance(error, HomeMismatch):
        return type(error)("something in the home of the server is damaged: its operator is told")
    shown = type(error).__new__(type(error), _FOLDERS.sub("", str(error)))  # constructors of errors differ
    shown.__dict__.update(vars(error))
    return shown


def advice(kind: str) -> str:
    """Return what the operator can do about refusals of this kind."""
    return BY_KIND.get(kind, OTHERWISE)
