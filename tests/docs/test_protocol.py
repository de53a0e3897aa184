"""docs/protocol.md against the contract and the errors."""

import hashlib
import re
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor

from attune.common.errors import AttuneError, WireError
from attune.common.pb import federation_pb2
from attune.common.wire.malformed import KINDS, Malformed
from attune.fedserver.pb import admin_pb2
from docs.tables import TO_DO, error_classes

PAGE = "docs/protocol.md"
FILES = (federation_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR)


def messages() -> list[Descriptor]:
    return [message for file in FILES for message in file.message_types_by_name.values()]


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


def test_each_error_has_a_kind_of_its_own_and_says_what_to_do() -> None:
    classes = {error for error in error_classes() if error is not Malformed and error is not AttuneError}
    kinds = [error.kind for error in classes] + list(KINDS)
    assert len(kinds) == len(set(kinds))
    assert not [error for error in classes if not TO_DO.search(error.__doc__ or "")]


def test_exit_codes_tell_errors_apart() -> None:
    """Require one code for each kind, except malformed data, which share one, and errors that never end a command."""
    shared = {"cancelled", "upload-busy", "damaged", "upload-taken-over", "stalled", "request-refused", "budget-spent"}
    codes = [error.exit_code for error in set(error_classes()) if error.kind not in shared and not issubclass(error, WireError)]
    assert len(codes) == len(set(codes))


def test_the_licence_is_apache_2_unmodified(root: Any) -> None:
    digest = hashlib.sha256((root / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
