"""Each kind of malformed header has its own error; unusual, but well-formed, headers are read."""

import math
from typing import Any

import msgspec
import pytest

from attune.common.errors import AttuneError, LimitExceeded, WireError, from_kind
from attune.common.text import from_json
from attune.common.wire import malformed as bad
from attune.common.wire.blobs import read_frames
from attune.common.wire.files import TensorFile, read_tensors
from attune.common.wire.header import ITEM_BYTES, Limits, TensorSpec, header_bytes, layout_of, parse_header
from tests.raising import malformed


def entry(start: int = 0, end: int = 4, dtype: object = "F32", shape: object = (1,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


F32 = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
CASES = [
    # header text
    ("header-not-json", b"[]", 0),
    ("header-not-json", b"", 0),
    ("header-not-json", b" {}", 0),
    ("header-not-json", b"{}x", 0),
    ("header-not-json", b'{"w":' + F32.encode(), 4),
    ("header-not-json", b'{"\xff":1}', 0),
    ("header-not-json", b'{"a\x01":1}', 0),
    ("header-not-json", b'{"a":' + b"1" * 5000 + b"}", 0),
    ("header-not-json", '{"w":1}'.encode("utf-16"), 0),
    ("header-not-json", b"{]", 0),
    ("header-not-json", b'{"unterminated', 0),
    ("header-not-json", b'{"unterminated\\', 0),
    ("header-too-deep", b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0),
    ("header-too-deep", b'{"w":' + b"[" * 100_000, 0),
    ("header-too-deep", b'{"w":{"shape":[[]]}}', 0),
    ("header-too-deep", b'{"a":{"b":{"c":{}}}}', 0),
    ("duplicate-key", f'{{"w":{F32},"w":{F32}}}'.encode(), 4),
    ("duplicate-key", f'{{"w":{F32},"\\u0077":{F32}}}'.encode(), 4),
    ("duplicate-key", b'{"w":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4),
    # metadata and names
    ("bad-metadata", {"__metadata__": {"a": 1}}, 0),
    ("bad-metadata", {"__metadata__": "a"}, 0),
    ("bad-name", {"": entry()}, 4),
    ("bad-name", {"a\nb": entry()}, 4),
    ("bad-name", b'{"\\ud800":' + F32.encode() + b"}", 4),
    ("name-too-long", {"a" * 513: entry()}, 4),
    ("name-too-long", {"é" * 257: entry()}, 4),
    # entries
    ("bad-entry", {"w": 1}, 0),
    ("bad-entry", {"w": {"dtype": "F32", "shape": [1]}}, 4),
    ("bad-entry", {"w": entry() | {"extra": 1}}, 4),
    ("unknown-dtype", {"w": entry(dtype="F8_E4M3")}, 4),
    ("unknown-dtype", {"w": entry(dtype="f32")}, 4),
    ("unknown-dtype", {"w": entry(dtype=["F32"])}, 4),
    ("bad-shape", {"w": entry(shape=[-1])}, 4),
    ("bad-shape", {"w": entry(shape=[-1, -1])}, 4),
    ("bad-shape", {"w": entry(shape=[1.0])}, 4),
    ("bad-shape", {"w": entry(shape=[True])}, 4),
    ("bad-shape", {"w": entry(shape="1")}, 4),
    ("bad-shape", b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', 4),
    ("shape-too-large", {"w": entry(shape=[1] * 65)}, 4),
    ("shape-too-large", {"w": entry(shape=[1 << 64])}, 4),
    ("shape-too-large", {"w": entry(shape=[1 << 32, 1 << 32])}, 4),  # 2^64 elements: zero, were it counted in 64 bits
    ("shape-too-large", {"w": entry(0, 0, shape=[0, 1 << 62, 1 << 62])}, 0),
    # offsets
    ("bad-offsets", {"w": entry() | {"data_offsets": [0]}}, 4),
    ("bad-offsets", {"w": entry() | {"data_offsets": [0, 4, 8]}}, 4),
    ("bad-offsets", {"w": entry() | {"data_offsets": [0.0, 4.0]}}, 4),
    ("bad-offsets", {"w": entry() | {"data_offsets": [False, 4]}}, 4),
    ("bad-offsets", {"w": entry() | {"data_offsets": {"0": 4}}}, 4),
    ("bad-offsets", {"w": entry(-4, 0)}, 4),
    ("bad-offsets", {"w": entry(4, 0)}, 4),
    ("bad-offsets", {"w": entry(1 << 64, (1 << 64) + 4)}, 4),
    ("size-mismatch", {"w": entry(0, 8)}, 8),
    ("size-mismatch", {"w": entry(0, 4, shape=[2])}, 4),
    ("size-mismatch", {"w": entry(0, 0, shape=[])}, 0),
    ("misaligned", {"b": entry(0, 1, "U8"), "w": entry(1, 5)}, 5),
    ("overlap", {"a": entry(0, 4), "b": entry(0, 4)}, 4),
    ("overlap", {"a": entry(0, 8, shape=[2]), "b": entry(4, 8)}, 8),
    ("overlap", {"a": entry(0, 8, shape=[2]), "none": entry(4, 4, shape=[0])}, 8),
    ("gap", {"w": entry(4, 8)}, 8),
    ("gap", {"a": entry(0, 4), "b": entry(8, 12)}, 12),
    ("gap", {"a": entry(0, 4), "none": entry(8, 8, shape=[0])}, 8),
    ("out-of-range", {"w": entry(0, 4)}, 3),
    ("out-of-range", {"w": entry(0, 1 << 40, "U8", [1 << 40])}, 4),
    ("trailing-bytes", {"w": entry(0, 4)}, 5),
    ("trailing-bytes", {}, 1),
]


@pytest.mark.parametrize(("kind", "header", "data"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_each_way_of_being_malformed_has_its_error(kind, header, data, blob_of, written):
    path = written(blob_of(header, data))
    for read in (TensorFile, read_tensors):
        with pytest.raises(WireError, match=r"peer\.safetensors") as caught:
            read(path)
        assert caught.value.kind == kind
        assert str(caught.value).isascii()
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("header-truncated", b""),
        ("header-truncated", b"\x08\0\0"),
        ("header-truncated", b"\x08" + b"\0" * 7 + b"{}"),
        ("header-too-large", b"\xff" * 8),
        ("header-too-large", b"\x08\0\0\x01" + b"\0" * 4),  # 16 MiB + 8
        ("misaligned", b"\x02" + b"\0" * 7 + b"{}"),
    ],
)
def test_the_length_is_checked_before_the_header_is_read(kind, data, written):
    for read in (TensorFile, read_tensors):
        with pytest.raises(WireError) as caught:
            read(written(data))
        assert caught.value.kind == kind


def test_limits_are_arguments(blob_of, written):
    many = {f"w{i}": entry(4 * i, 4 * i + 4) for i in range(5)}
    path = written(blob_of(many, 20))
    assert len(TensorFile(path, Limits(max_tensors=5, max_name_bytes=2, max_blob_bytes=path.stat().st_size))) == 5
    for kind, limits in [
        ("too-many-tensors", Limits(max_tensors=4)),
        ("name-too-long", Limits(max_name_bytes=1)),
        ("header-too-large", Limits(max_header_bytes=100)),
    ]:
        with malformed(kind):
            TensorFile(path, limits)
    with pytest.raises(LimitExceeded):
        TensorFile(path, Limits(max_blob_bytes=path.stat().st_size - 1))
    for text in [b'{"":[' + b"0," * 5000 + b"0]}", b"{" + b'"":0,' * 5000 + b'"":0}', b'{"":{"":' + b"[]," * 5000 + b"[]}}"]:
        with malformed("header-too-long"):
            TensorFile(written(blob_of(text)), Limits(max_tensors=5))


def test_unusual_but_valid_headers_are_read(blob_of, written):
    text = b'{ "b" :{"shape":[ 1 ],"data_offsets":[4,8],"dtype":"F32"},\n"__metadata__":{"x":"{[[[[","y":"\\"}","z":"\\ud800"},'
    text += (
        b'"{[[[[\\\\":{"dtype":"F32","data_offsets":[0,4],"shape":[1,1]},"z":{"dtype":"I64","data_offsets":[8,8],"shape":[0]}}'
    )
    with TensorFile(written(blob_of(text, 8))) as file:
        assert list(file) == ["{[[[[\\", "b", "z"]
        assert [tuple(tensor.shape) for tensor in file.values()] == [(1, 1), (1,), (0,)]
    assert read_tensors(written(blob_of({}))) == {}
    high_rank = {"w": entry(0, 4, shape=[1] * 64)}
    assert read_tensors(written(blob_of(high_rank, 4)), Limits(max_tensors=1))["w"].ndim == 64


def test_layout_covers_the_data_once_and_is_aligned():
    manifest = {f"{dtype}{i}": TensorSpec(dtype, shape) for dtype in ITEM_BYTES for i, shape in enumerate([(3,), (), (0, 7)])}
    layout = layout_of(manifest)
    end = layout.data_start
    for name, (start, stop) in layout.spans.items():
        assert start == end
        assert start % ITEM_BYTES[manifest[name].dtype] == 0
        assert stop - start == math.prod(manifest[name].shape) * ITEM_BYTES[manifest[name].dtype]
        end = stop
    assert end == layout.size
    length = header_bytes(layout.header[:8], layout.size, Limits(), "self")
    assert length == layout.data_start - 8
    parsed = parse_header(layout.header[8:], layout.size, Limits(), "self")
    assert (parsed.manifest, parsed.spans) == (manifest, layout.spans)


def test_offsets_beyond_2_gib_and_4_gib():
    """Use 3 tensors of 2^40, 2^33 and 12 bytes: plain arithmetic, without allocation."""
    layout = layout_of({"a": TensorSpec("F64", (1 << 37,)), "b": TensorSpec("F32", (1 << 31,)), "c": TensorSpec("I32", (3,))})
    start = layout.data_start
    assert layout.spans["b"] == (start + (1 << 40), start + (1 << 40) + (1 << 33))
    assert layout.size == start + (1 << 40) + (1 << 33) + 12
    again = parse_header(layout.header[8:], layout.size, Limits(max_blob_bytes=1 << 41), "self")
    assert again.spans == layout.spans


@pytest.mark.parametrize(
    ("kind", "manifest", "limits"),
    [
        ("unknown-dtype", {"w": TensorSpec("F8", (1,))}, None),
        ("bad-name", {"__metadata__": TensorSpec("F32", (1,))}, None),
        ("bad-name", {"\ud800": TensorSpec("F32", (1,))}, None),
        ("name-too-long", {"n" * 513: TensorSpec("F32", (1,))}, None),
        ("bad-shape", {"w": TensorSpec("F32", (-1,))}, None),
        ("header-too-large", {"w": TensorSpec("F32", (1,))}, Limits(max_header_bytes=55)),
        ("too-many-tensors", {str(i): TensorSpec("U8", ()) for i in range((1 << 16) + 1)}, None),
    ],
)
def test_nothing_is_written_that_would_be_refused(kind, manifest, limits):
    with malformed(kind):
        layout_of(manifest, limits)


def test_kinds_are_distinct_and_travel():
    classes = (bad.Truncated, bad.DigestMismatch, bad.BadOffset)
    for cls in classes:
        assert issubclass(cls, WireError)
        assert type(from_kind(cls.kind, "message")) is cls
    for kind in bad.KINDS:
        there = bad.Malformed(kind, "message")
        here = from_kind(kind, "message")
        assert type(here) is bad.Malformed and issubclass(bad.Malformed, WireError)
        assert (here.kind, str(here)) == (kind, "message")
        too_much = kind in {"header-too-large", "header-too-long", "too-many-tensors", "name-too-long", "shape-too-large"}
        assert here.status == there.status == (LimitExceeded if too_much else WireError).status
        assert here.exit_code == WireError.exit_code
    named = [*bad.KINDS, *(cls.kind for cls in (*classes, WireError, LimitExceeded))]
    assert len(named) == len(set(named)) == 37
    assert type(from_kind("malformed-in-a-way-of-tomorrow", "message")) is AttuneError


# --- files as frames

DATA = bytes(range(256)) * 40


def test_frames_of_a_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(DATA)
    assert list(read_frames(path, 240, lambda: 5000)) == [DATA[240:5240], DATA[5240:]]
    assert list(read_frames(path, len(DATA))) == []
    for offset in (-1, len(DATA) + 1):
        with pytest.raises(bad.BadOffset):
            read_frames(path, offset)
    with pytest.raises(FileNotFoundError):
        read_frames(tmp_path / "absent", 0)


# --- unreadable JSON has one kind of error, for every fault


@pytest.mark.parametrize("text", [b"", b"{", b'"\xff"', b'{"\xc3": 1}', b"\xff", b"[" * 100_000, '{"a": "\ud800"}'])
def test_what_cannot_be_read_is_a_decode_error(text: bytes | str) -> None:
    with pytest.raises(msgspec.DecodeError):
        from_json(text, Any)


def test_what_is_whole_is_read() -> None:
    assert from_json('{"a": ["\u00e9"]}'.encode(), dict[str, list[str]]) == {"a": ["\u00e9"]}
    with pytest.raises(msgspec.ValidationError):
        from_json(b"1", str)
