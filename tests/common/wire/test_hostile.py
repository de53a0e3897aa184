"""Hostile bytes: over 20,000 cases that raise only WireErrors, with memory bounded by the header's size.

A test expects the causes that any draw meets often; test_header.py has an example of each cause. Bytes that our reader accepts
are compared with the safetensors package: it must accept them too, and see the same tensors.
"""

import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attune.common.errors import WireError
from attune.common.wire.files import TensorFile, read_tensors
from attune.common.wire.header import Limits, layout_in, parse_header
from attune.common.wire.tensors import views

LIMITS = Limits(max_blob_bytes=1 << 20, max_header_bytes=1 << 12, max_tensors=50, max_name_bytes=40)
FUZZ = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}

VALID = [
    safetensors.torch.save({}),
    safetensors.torch.save({"w": torch.arange(3.0)}, metadata={"attune": "text"}),
    safetensors.torch.save(
        {
            "weight": torch.ones(2, 3, dtype=torch.bfloat16),
            "bias": torch.zeros(2, dtype=torch.float64),
            "steps": torch.tensor(5),
            "mask": torch.tensor([True, False, True]),
            "none": torch.empty(0, 4),
        }
    ),
]
BOUNDARIES = [2**power + near for power in (8, 32, 53, 63, 64) for near in (-1, 0, 1)]
NUMBERS = [0, 1, -1, 2, 3, 4, 7, 8, 12, 24, *BOUNDARIES, 2**31, 2**62, 2**64 - 8]
ODD: list[Any] = [
    None,
    True,
    False,
    0.0,
    -0.0,
    1e400,
    "",
    "F32",
    "F16",
    "BOOL",
    "U8",
    "I64",
    "F8_E5M2",
    "C64",
    [],
    {},
    [[]],
    [{}],
    {"a": 1},
]
TOKENS = [b"{", b"}", b"[", b"]", b":", b",", b'"', b"\\", b'"w"', b'"dtype"', b'"F32"', b'"U8"', b'"shape"', b'"data_offsets"']
TOKENS += [b"0", b"1", b"4", b"-1", b"1e9", b"NaN", b"null", b"true", b"[0,4]", b"[1]", b"[]", b" ", b"\0", b"\xff", b"\\ud800"]
TOKENS += [b'"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}', b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}']
TOKENS += [b'"__metadata__":{"a":"b"}', b'"__metadata__":']

values = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(ODD))
lists = st.one_of(st.lists(st.sampled_from(NUMBERS), max_size=4), values)


def offer(data: bytes, seen: Counter[str]) -> None:
    """Read one case, and count its outcome. Any other exception than a WireError fails the test."""
    try:
        layout = layout_in(memoryview(data), LIMITS, "peer")
        assert sum(spec.size_bytes for spec in layout.manifest.values()) == len(data) - layout.data_start
        views(torch.frombuffer(bytearray(data), dtype=torch.uint8), layout, "peer")
    except WireError as error:
        assert error.kind != WireError.kind
        seen[error.kind] += 1
        return
    seen["accepted"] += 1
    theirs = dict(safetensors.deserialize(data))
    assert {name: (spec.dtype, list(spec.shape)) for name, spec in layout.manifest.items()} == {
        name: (info["dtype"], info["shape"]) for name, info in theirs.items()
    }
    for name, (start, end) in layout.spans.items():
        assert data[start:end] == bytes(theirs[name]["data"])


def framed(text: bytes, data: bytes = b"") -> bytes:
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def parts(blob: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(blob[:8], "little")
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


def test_raw_bytes():
    seen: Counter[str] = Counter()

    @settings(max_examples=2500, **FUZZ)
    @given(st.binary(max_size=200))
    def cases(raw):
        offer(raw, seen)
        offer(framed(raw), seen)
        offer(framed(b"{" + raw), seen)

    cases()
    assert seen.total() >= 7500
    assert {"header-truncated", "header-too-large", "header-not-json"} <= seen.keys()


def test_pieces_of_json():
    seen: Counter[str] = Counter()

    @settings(max_examples=1500, **FUZZ)
    @given(st.lists(st.sampled_from(TOKENS), max_size=16))
    def cases(tokens):
        text = b"".join(tokens)
        for whole in (text, b"{" + text + b"}", b'{"w":{' + text + b"}}", b"{" + b",".join(tokens) + b"}"):
            offer(framed(whole, bytes(4)), seen)

    cases()
    assert seen.total() >= 6000
    assert {"header-not-json", "header-too-deep"} <= seen.keys()


def test_edited_bytes_of_valid_files():
    """Make each edit alone, then all of them one after the other."""
    seen: Counter[str] = Counter()
    edit = st.tuples(st.sampled_from(["flip", "cut", "drop", "insert", "length"]), st.integers(0, 399), st.sampled_from(TOKENS))

    def edited(blob: bytes, kind: str, place: int, token: bytes) -> bytes:
        at = place % (len(blob) + 1)
        if kind == "flip":
            return blob[:at] + bytes(byte ^ (1 << place % 8) for byte in blob[at : at + 1]) + blob[at + 1 :]
        if kind == "cut":
            return blob[:at]
        if kind == "drop":
            return blob[:at] + blob[at + 1 + place % 3 :]
        if kind == "insert":
            return blob[:at] + token + blob[at:]
        return (place * 8).to_bytes(8, "little") + blob[8:]

    @settings(max_examples=700, **FUZZ)
    @given(st.sampled_from(VALID), st.lists(edit, min_size=4, max_size=8))
    def cases(blob, edits):
        chain = blob
        for one in edits:
            offer(edited(blob, *one), seen)
            chain = edited(chain, *one)
            offer(chain, seen)

    cases()
    assert seen.total() >= 5600
    assert {"accepted", "header-truncated", "header-not-json", "header-too-large"} <= seen.keys()


def test_edited_headers_of_valid_files():
    """Keep the JSON well-formed and the lengths right: only the meaning is wrong."""
    seen: Counter[str] = Counter()
    edit = st.one_of(
        st.tuples(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]), st.integers(0, 9), lists),
        st.tuples(st.sampled_from(["entry", "rename", "remove", "copy", "data"]), st.integers(0, 9), values),
    )

    def edited(header: dict[str, Any], data: bytes, kind: str, place: int, value: Any) -> tuple[dict[str, Any], bytes]:
        header = json.loads(json.dumps(header))
        name = sorted(header)[place % len(header)] if header else "w"
        if kind == "data":
            return header, data[:place] if value is None else data + bytes(place)
        if kind in ("entry", "remove"):
            header[name] = value
            if kind == "remove":
                del header[name]
        elif kind in ("rename", "copy"):
            header[str(value)] = header.pop(name, None) if kind == "rename" else header.get(name)
        elif isinstance(header.get(name), dict):
            header[name][kind] = value
        return header, data

    @settings(max_examples=700, **FUZZ)
    @given(st.sampled_from(VALID[1:]), st.lists(edit, min_size=3, max_size=6))
    def cases(blob, edits):
        chain = start = parts(blob)
        for one in edits:
            header, data = edited(*start, *one)
            offer(framed(json.dumps(header).encode(), data), seen)
            chain = edited(*chain, *one)
            offer(framed(json.dumps(chain[0]).encode(), chain[1]), seen)

    cases()
    assert seen.total() >= 4200
    expected = {"bad-entry", "unknown-dtype", "bad-shape", "bad-offsets", "size-mismatch", "shape-too-large", "overlap", "gap"}
    assert expected | {"accepted", "trailing-bytes"} <= seen.keys()


def outcome(read: Callable[[], object]) -> str:
    try:
        read()
    except WireError as error:
        return error.kind
    return "accepted"


def test_files_of_a_peer_fail_like_buffers(tmp_path: Path):
    """Check that both readers of files raise the same error as the reader of buffers, for every cut and every flipped byte."""
    path, blob, seen = tmp_path / "peer", VALID[2], Counter()
    cuts = [blob[:end] for end in range(len(blob))]
    for data in cuts + [blob[:at] + bytes([blob[at] ^ 4]) + blob[at + 1 :] for at in range(len(blob))]:
        path.write_bytes(data)
        kind = outcome(lambda: dict(TensorFile(path, LIMITS)))
        assert outcome(lambda: read_tensors(path, LIMITS)) == kind
        single: Counter[str] = Counter()
        offer(data, single)
        assert [*single] == [kind]
        seen[kind] += 1
    assert seen["not-boolean"] == 3
    assert seen["header-truncated"] + seen["out-of-range"] >= len(blob)


HEADER = 1 << 19
BOMBS = {
    "openers": b'{"a":' + b"[" * HEADER,
    "deep": b'{"a":' + b"[" * (HEADER // 2) + b"]" * (HEADER // 2) + b"}",
    "numbers": b'{"a":{"shape":[' + b"0," * (HEADER // 2) + b"0]}}",
    "lists": b'{"a":{"b":[]' + b',"b":[]' * (HEADER // 7) + b"}}",
    "objects": b'{"":{}' + b',"":{}' * (HEADER // 6) + b"}",
    "members": b'{"":0' + b',"":0' * (HEADER // 5) + b"}",
    "metadata": b'{"__metadata__":{' + b",".join(b'"%x":""' % i for i in range(HEADER // 10)) + b"}}",
    "short strings": b"{" + b'"":' * (HEADER // 3),
    "shorter strings": b"{" + b'"" ' * (HEADER // 3),
    "separated strings": b"{" + b'"",,' * (HEADER // 4),
    "escapes": b'{"' + b"\\" * HEADER,
    "unterminated": b'{"' + b'\\"' * (HEADER // 2),
    "quotes": b'{"' + b'"' * HEADER,
    "a long name": b'{"' + b"a" * HEADER + b'":0}',
    "a wide name": b'{"' + "😀".encode() + b"a" * HEADER + b'":0}',
    "a long number": b'{"a":' + b"9" * HEADER + b"}",
    "a long fraction": b'{"a":1.' + b"9" * HEADER + b"}",
    "spaces": b"{" + b" " * HEADER + b"}",
    "huge shape": b'{"a":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (1 << 40, 1 << 40),
    "empty tensors": b"{"
    + b",".join(b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(HEADER // 56))
    + b',"x":0}',
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("max_tensors", [4096, 65536])
@pytest.mark.parametrize("name", BOMBS)
def test_memory_is_bounded_whatever_the_header_says(name, max_tensors):
    """Use about half a MiB of the worst text: it needs no more memory than Limits promises, and no quadratic time (hours)."""
    text = BOMBS[name]
    assert len(text) < HEADER + 50_000
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            parse_header(text, len(text) + 8 + 4, Limits(max_tensors=max_tensors), "peer")
        assert tracemalloc.get_traced_memory()[1] < 8 * len(text) + 1536 * max_tensors
    finally:
        tracemalloc.stop()


def test_what_is_announced_is_not_allocated(tmp_path: Path):
    """Use a file of a few bytes that announces terabytes: no reader allocates them."""
    path = tmp_path / "peer"
    path.write_bytes(framed(BOMBS["huge shape"], b"1234"))
    tracemalloc.start()
    try:
        for read in (TensorFile, read_tensors):
            with pytest.raises(WireError) as caught:
                read(path)
            assert caught.value.kind == "out-of-range"
        path.write_bytes((1 << 62).to_bytes(8, "little"))
        for read in (TensorFile, read_tensors):
            with pytest.raises(WireError):
                read(path)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
