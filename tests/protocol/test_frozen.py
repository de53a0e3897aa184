"""Version 1 is frozen: the contract and the generated code have all that the record has, unchanged."""

from collections.abc import Callable

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet

from attune.common.pb import federation_pb2
from attune.fedserver.pb import admin_pb2
from tests.protocol.record import compiled, facts, gone, load


def generated() -> FileDescriptorSet:
    """Return the contract as the generated code has it."""
    found = FileDescriptorSet()
    for module in (federation_pb2, admin_pb2):
        module.DESCRIPTOR.CopyToProto(found.file.add())
    return found


def test_the_record_is_of_the_whole_contract_of_devices_and_operators() -> None:
    found = facts(load())
    assert "field attune.v1.Hello.protocol = 1: LABEL_OPTIONAL TYPE_UINT32" in found
    assert "field attune.v1.ServerMessage.order = 3: LABEL_OPTIONAL TYPE_MESSAGE .attune.v1.Order of message" in found
    assert "enum attune.v1.Receipt.Status.STATUS_LATE = 2" in found
    assert "call /attune.v1.Blobs/Upload: stream .attune.v1.Frame -> .attune.v1.UploadReply" in found
    assert "call /attune.v1.Admin/Wake: .attune.v1.WakeRequest -> .attune.v1.WakeReply" in found


def test_the_contract_still_has_all_of_it() -> None:
    assert gone(load(), compiled()) == []


def test_the_generated_code_still_has_all_of_it() -> None:
    assert gone(load(), generated()) == []


def _message(file: FileDescriptorProto, name: str) -> DescriptorProto:
    return next(message for message in file.message_type if message.name == name)


def _retype(file: FileDescriptorProto) -> None:
    _message(file, "BlobRef").field[2].type = DescriptorProto.DESCRIPTOR.fields_by_name["name"].type


BREAKS: dict[str, Callable[[FileDescriptorProto], object]] = {
    "a message is gone": lambda file: file.message_type.remove(_message(file, "Progress")),
    "a field is gone": lambda file: _message(file, "Order").field.pop(),
    "a field is renamed": lambda file: setattr(_message(file, "Order").field[0], "name", "key"),
    "a field is renumbered": lambda file: setattr(_message(file, "Order").field[0], "number", 99),
    "a field is retyped": _retype,
    "a field is repeated": lambda file: setattr(_message(file, "Order").field[0], "label", 3),
    "a field has left its oneof": lambda file: _message(file, "DeviceMessage").field[0].ClearField("oneof_index"),
    "an enum value is renumbered": lambda file: setattr(file.enum_type[0].value[1], "number", 7),
    "an enum value is gone": lambda file: _message(file, "Receipt").enum_type[0].value.pop(),
    "a call is gone": lambda file: file.service[0].method.pop(),
    "a call streams": lambda file: setattr(file.service[0].method[0], "server_streaming", True),
    "a call takes something else": lambda file: setattr(file.service[0].method[0], "input_type", ".attune.v1.Update"),
}


@pytest.mark.parametrize("case", BREAKS)
def test_a_change_that_breaks_version_1_is_found(case: str) -> None:
    changed = load()
    BREAKS[case](next(file for file in changed.file if file.name.endswith("federation.proto")))
    assert gone(load(), changed)


def test_an_addition_breaks_nothing() -> None:
    changed = load()
    file = next(file for file in changed.file if file.name.endswith("federation.proto"))
    _message(file, "Order").field.add(name="further", number=100, type=9, label=1)
    file.message_type.add(name="Further")
    assert gone(load(), changed) == []
    assert gone(changed, load()) == [
        "field attune.v1.Order.further = 100: LABEL_OPTIONAL TYPE_STRING",
        "message attune.v1.Further",
    ]
