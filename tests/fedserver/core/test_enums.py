"""Members of a StrEnum become their text in formatted strings, on every Python."""

from __future__ import annotations

import json

import msgspec
import pytest

from attune.fedserver.core.messages import Phase, StrEnum
from attune.fedserver.core.phases import PhaseKey
from attune.fedserver.federation.streams import DeviceStage


@pytest.mark.parametrize("kind", [Phase, PhaseKey, DeviceStage])
def test_a_member_is_its_text(kind: type[StrEnum]) -> None:
    for member in kind:
        text = str.__str__(member)
        assert str(member) == f"{member}" == "%s" % member == "{}".format(member) == "".join([member]) == text  # noqa: UP031, UP032
        assert f"{member:>20}|{member!s}" == f"{text:>20}|{text}"
        assert type(str(member)) is str
        assert member == text and {text: 1}[member] == 1 and kind(text) is member
        assert json.dumps({"phase": member}) == json.dumps({"phase": text})
        assert msgspec.json.decode(msgspec.json.encode(member), type=kind) is member
