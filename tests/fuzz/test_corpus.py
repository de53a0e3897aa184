"""Kept inputs of fuzzers are tried again: the only errors are those that name the fault. `make fuzz` looks for more."""

import struct

import pytest

from attune.common.pb import federation_pb2 as pb
from tests.fuzz import targets
from tests.fuzz.corpus import kept
from tests.fuzz.seeds import seeds
from tests.fuzz.targets import MESSAGES, TARGETS, throw

FOUND = {  # each of these was a crash while the targets were written
    "a progress that is no number": bytes([0]) + pb.DeviceMessage(progress=pb.Progress(done=float("nan"))).SerializeToString(),
    "a profile that is no UTF-8": bytes([6]) + pb.Hello(profile_json=b'{"kind": "\xff"}').SerializeToString(),
    "metrics that are no UTF-8": bytes([1])
    + pb.Update(order_id="train-1-mallory", metrics_json=b'{"kept": "\xff"}').SerializeToString(),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_a_crash_is_none(what: str) -> None:
    throw("message", FOUND[what])


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_found_is_refused_by_name_or_whole(target: str) -> None:
    inputs = kept(target)
    assert inputs
    for data in (*inputs, *seeds(target), b""):
        throw(target, data)


def test_a_seed_goes_through_to_the_end() -> None:
    """Check that good seeds are accepted: a target that refuses everything would pass otherwise. Some seeds are damaged."""
    for data in seeds("header"):
        TARGETS["header"](data)
    TARGETS["token"](seeds("token")[0])
    TARGETS["csr"](seeds("csr")[0])
    for data in seeds("message"):
        TARGETS["message"](data)


def test_what_is_not_foreseen_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(targets.TARGETS, "header", lambda data: struct.unpack("<Q", data))
    with pytest.raises(struct.error):
        throw("header", b"")


def test_every_message_that_travels_alone_is_thrown() -> None:
    """Leave out messages that travel within others, and those without fields."""
    inner = {"Beat", "Progress", "Trouble", "Welcome", "Notice", "Order", "BlobRef", "Return", "Finish", "Frame"}
    inner |= {"SecureMessage", "SecureMember", "StatisticsRequest", "StatisticsReport", "UnitReport", "Description"}
    thrown = {kind.DESCRIPTOR.name for kind, _ in MESSAGES}
    known = {name for name, each in pb.DESCRIPTOR.message_types_by_name.items() if each.fields}
    assert known - inner <= thrown | {"UploadOffsetReply"}
