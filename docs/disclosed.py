"""The table of what leaves a device, made from fedclient/disclosed.toml, and the fields that a device's messages have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from attune.common import protocol
from attune.common.metrics import Metrics
from attune.common.pb import federation_pb2 as pb
from attune.common.plan import Profile
from attune.common.secure.secure_sum import REPORTED
from attune.fedclient.gate import decisions
from attune.fedserver.view.status import SENT_WORDS
from docs.markdown import table


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
                *(SENT_WORDS[mode] for mode in (decision.usual, decision.noise, decision.secure)),
            )
            for decision in decisions()
        ),
    )


REGIONS = {"disclosed": disclosed}
