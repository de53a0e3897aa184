"""Errors tell a device nothing about the files of the server."""

from __future__ import annotations

import pytest

from attune.common.wire.digest import digest_of
from tests.attacks.attacks import order, with_header
from tests.attacks.conftest import Victim
from tests.e2e.hand import pb, refusal

ENTRY = '{{"x": {{"dtype": "{}", "shape": [1], "data_offsets": [{}, {}]}}}}'
BLOBS = {
    "empty": b"",
    "header too large": (1 << 62).to_bytes(8, "little"),
    "deep": with_header("{" * 3000),
    "no JSON": with_header("{,}"),
    "no such dtype": with_header(ENTRY.format("Q9", 0, 4), bytes(4)),
    "gap": with_header(ENTRY.format("F32", 4, 8), bytes(8)),
    "trailing bytes": with_header(ENTRY.format("F32", 0, 4), bytes(40)),
    "out of range": with_header(ENTRY.format("F32", 0, 4)),
    "misaligned": len(ENTRY.format("F32", 0, 4) + "x").to_bytes(8, "little")
    + (ENTRY.format("F32", 0, 4) + " ").encode()
    + bytes(4),
    "no boolean": with_header(ENTRY.format("BOOL", 0, 1), b"\x07"),
    "twice": with_header('{"x": 1, "x": 2}'),
}


@pytest.mark.parametrize("kind", BLOBS)
def test_an_error_about_a_blob_names_no_folder_of_the_server(victim: Victim, kind: str) -> None:
    eve, data = victim.devices["eve"], BLOBS[kind]
    eve.upload(order(victim), "shared", [data], digest_of(data), len(data))
    ref = pb.BlobRef(part="shared", digest=digest_of(data), size=len(data))
    _, message = refusal(lambda: eve.submit(order(victim), [ref]))
    assert str(victim.federation.folder) not in message
    assert "/attune/" not in message and ".part" not in message, message
