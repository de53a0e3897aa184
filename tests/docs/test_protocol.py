"""docs/protocol.md against the contract and the tree of errors."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from attune.common.errors import AttuneError, WireError
from attune.common.metrics import Metrics
from attune.common.pb import federation_pb2
from attune.common.wire.malformed import KINDS, Malformed
from attune.fedserver.pb import admin_pb2

PAGE = "docs/protocol.md"
FILES = (federation_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)


def messages() -> list[Descriptor]:
    return [message for file in FILES for message in file.message_types_by_name.values()]


def errors(root: type[AttuneError] = AttuneError) -> Iterator[type[AttuneError]]:
    """Every error of the three packages, once all their modules are imported."""
    if root is AttuneError:
        for side in ("common", "fedserver", "fedclient"):
            package = importlib.import_module(f"attune.{side}")
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                try:
                    importlib.import_module(module.name)
                except ModuleNotFoundError as missing:  # of an extra that is not installed
                    assert missing.name is not None and not missing.name.startswith("attune")
    if root.__module__.startswith("attune."):
        yield root
    for child in root.__subclasses__():
        yield from errors(child)


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.name)
def test_every_message_and_each_of_its_fields_is_described(message: Descriptor, page: Any) -> None:
    text = page(PAGE).text
    start = re.search(rf"\*\*{message.name}\*\*", text)
    assert start is not None, f"{message.name} is not described"
    described = text[start.start() :].split("\n#", 1)[0]
    for field in message.fields:
        assert f"`{field.name}`" in described, f"{message.name}.{field.name} is not described"


def test_every_call_and_enum_value_is_described(page: Any) -> None:
    text = page(PAGE).text
    calls = [method.name for file in FILES for service in file.services_by_name.values() for method in service.methods]
    enums = [*FILES[0].enum_types_by_name.values(), *(enum for message in messages() for enum in message.enum_types)]
    for name in [*calls, *(value.name for enum in enums for value in enum.values)]:
        assert f"`{name}`" in text, f"{name} is not described"


def test_the_table_of_metrics_is_the_struct(page: Any) -> None:
    rows = page(PAGE).table("### The metrics")
    assert [row[0].strip("`") for row in rows] == list(Metrics.__struct_fields__)
    assert all(row[1] and row[2] for row in rows)


def test_the_tables_of_errors_are_the_tree(page: Any) -> None:
    rows = page(PAGE).table("## Errors")
    found = {row[0].strip("`"): (row[1], int(row[2])) for row in rows}
    classes = {error for error in errors() if error is not Malformed}
    named = [*classes, *(Malformed(kind, "") for kind in KINDS)]
    assert found == {error.kind: (error.status, error.exit_code) for error in named}
    assert len(found) == len(named), "a kind names one error"
    assert len(rows) == len(found)
    assert all(row[3] for row in rows)


def test_exit_codes_tell_errors_apart() -> None:
    """One code a kind, but for the ways of being malformed and what never ends a command by itself."""
    shared = {"cancelled", "upload-busy", "damaged", "upload-taken-over", "stalled", "request-refused"}
    codes = [error.exit_code for error in set(errors()) if error.kind not in shared and not issubclass(error, WireError)]
    assert len(codes) == len(set(codes))


def test_the_licence_is_apache_2_unmodified(root: Any) -> None:
    digest = hashlib.sha256((root / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
