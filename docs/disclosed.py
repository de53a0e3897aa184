"""The table of what leaves a device, made from docs/disclosed.toml, and the fields that a device's messages have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from attune.common import protocol
from attune.common.metrics import Metrics
from attune.common.pb import federation_pb2 as pb
from attune.common.plan import Profile
from attune.common.secure.secure_sum import REPORTED
from docs.markdown import table

FILE = Path(__file__).with_suffix(".toml")
Mode = Literal["sent", "not sent", "disclosed", "disclosed noisy", "by --metrics", "charged", "noisy", "masked", "masked sum"]
WORDS: dict[Mode, str] = {
    "sent": "sent",
    "not sent": "not sent",
    "disclosed": "only with `--disclose statistics`",
    "disclosed noisy": "only with `--disclose statistics`, with noise",
    "by --metrics": "only with `--metrics all`",
    "charged": "only with `--metrics all`, or with noise (`noisy`)",
    "noisy": "with noise",
    "masked": "masked, in a sum",
    "masked sum": "only with `--disclose masked-statistics`, masked",
}


class Decision(msgspec.Struct, forbid_unknown_fields=True):
    """Decision about some fields."""

    name: str
    fields: list[str]
    sees: str
    why: str
    usual: Mode
    noise: Mode
    secure: Mode


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """Content of docs/disclosed.toml."""

    decision: list[Decision]


def decisions() -> list[Decision]:
    """Return all decisions, in the order of the table."""
    return msgspec.toml.decode(FILE.read_bytes(), type=_File).decision


def fields_sent() -> set[str]:
    """Return every field of every message that a device may send, with the JSON and the metadata in them."""
    names: set[str] = set()
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            names |= _of_message(method.input_type)
    names |= {f"metadata {getattr(protocol, name)}" for name in vars(protocol) if name.endswith("_KEY")}
    return names | _of_struct(Profile) | _of_struct(Metrics) | {f"Report.{field}" for field in REPORTED}


def _of_message(message: Any) -> set[str]:
    """Return the fields of a message and of those in it. A message without fields, such as Frame, stands for itself."""
    names = {f"{message.name}.{field.name}" for field in message.fields} or {message.name}
    inner = {field.message_type for field in message.fields if field.message_type not in (None, message)}
    return names.union(*map(_of_message, inner))


def _of_struct(struct: type[msgspec.Struct]) -> set[str]:
    names: set[str] = set()
    for field in msgspec.structs.fields(struct):
        names.add(f"{struct.__name__}.{field.name}")
        names = names.union(*map(_of_struct, _structs_in(field.type)))
    return names


def _structs_in(kind: Any) -> list[type[msgspec.Struct]]:
    """Return the structs in a type such as `list[Columns] | None`."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for inner in get_args(kind) for struct in _structs_in(inner)]


def disclosed() -> Iterator[str]:
    """Yield the table of what leaves a device."""
    yield from table(
        ("what", "who sees it", "why it is sent", "usually", "noise on the device", "training under secure aggregation"),
        (
            (
                decision.name,
                decision.sees,
                decision.why,
                *(WORDS[mode] for mode in (decision.usual, decision.noise, decision.secure)),
            )
            for decision in decisions()
        ),
    )


REGIONS = {"disclosed": disclosed}
