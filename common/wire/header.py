"""Header of a safetensors blob, written in one canonical form and checked when it is read. This module knows no tensors.

A blob is the header's length (8 bytes, little-endian), the header (JSON, padded with spaces to a multiple of 8), and the
tensors' bytes without gaps. Tensors are ordered by dtype, wide ones first, then by name, as the `safetensors` package does. So
each tensor is aligned to its element size, and equal tensors give equal bytes and one digest. Offsets are Python integers, so
there is no limit at 2 GiB.
"""

from __future__ import annotations

import json
import math
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from typing_extensions import Self

from attune.common.errors import LimitExceeded
from attune.common.wire.blobs import LocalFile, Readable
from attune.common.wire.malformed import Malformed

LENGTH_BYTES, FIRST_BYTES = 8, 4096  # of what is read first: it has most headers whole
ITEM_BYTES = {  # in the order of the file
    "U64": 8, "I64": 8, "F64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1,
}  # fmt: skip
MAX_RANK = 64  # as many dimensions as torch's own loops take
METADATA = "__metadata__"  # other programs put strings there; they are checked and not read
_ORDER = {dtype: place for place, dtype in enumerate(ITEM_BYTES)}
REMEMBERED, REMEMBERED_BYTES = 64, 1 << 16  # size of the cache of headers, and bytes of the longest header in it
_MEMBERS = {"dtype", "shape", "data_offsets"}
_NUMBERS_PER_TENSOR = 8  # on average: a rank above 6 in every tensor of a model is not a model
_QUOTES_PER_TENSOR = 12  # five strings, and a quote in the name
_FEW_TENSORS_SLACK = 4096  # so that a handful of tensors may have any rank, and there may be metadata
_INT63 = (1 << 63) - 1
T = TypeVar("T")

# For a text without escaped characters. A match consumes all characters that it has looked at, also an unterminated string at
# the end, so the scan is linear.
_STRING = re.compile(rb'"[^"]*"?')
_LEAF = re.compile(rb"\{\}|\[\]")
_DEPTH = 3  # {name: {"shape": []}}
_OPENERS = re.compile(rb"[{\[]{%d}" % (_DEPTH + 1))
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # controls, and lone surrogates, which JSON can spell


class TensorSpec(msgspec.Struct, frozen=True):
    """Dtype and shape of a tensor. `dtype` is safetensors' name for it, a key of ITEM_BYTES."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Manifest = dict[str, TensorSpec]


class Limits(msgspec.Struct, frozen=True):
    """Limits for accepted blobs. Reading a header takes at most 8 times its bytes plus 1.5 KiB * max_tensors of memory."""

    max_blob_bytes: int = 1 << 40
    max_header_bytes: int = 16 << 20
    max_tensors: int = 1 << 16
    max_name_bytes: int = 512


@dataclass(frozen=True)
class Layout:
    """Positions of all tensors in a blob. `manifest` and `spans` are in the order of the file."""

    manifest: Manifest
    spans: dict[str, tuple[int, int]]  # name -> [start, end) in bytes from the beginning of the blob
    data_start: int  # bytes of length and header
    size: int  # bytes of the whole blob
    header: bytes = field(default=b"", repr=False)  # length and JSON, for writers


_good: dict[tuple[bytes, int, Limits], Layout] = {}


def layout_of(manifest: Mapping[str, TensorSpec], limits: Limits | None = None) -> Layout:
    """Return the canonical layout of these tensors.

    Raises:
        Malformed: As in parse_header, so that a writer makes no blob that a reader would refuse.
    """
    return _laid_out(tuple(manifest.items()), limits or Limits())


@lru_cache(maxsize=REMEMBERED)
def _laid_out(tensors: tuple[tuple[str, TensorSpec], ...], limits: Limits) -> Layout:
    manifest = dict(tensors)
    if len(manifest) > limits.max_tensors:
        raise Malformed("too-many-tensors", f"{len(manifest)} tensors; at most {limits.max_tensors} are allowed")
    for name, spec in manifest.items():
        _check_name(name, limits)
        _check_spec(name, spec.dtype, list(spec.shape))
    ordered = dict(sorted(manifest.items(), key=lambda item: (_ORDER[item[1].dtype], item[0].encode())))
    entries: dict[str, Any] = {}
    relative: dict[str, tuple[int, int]] = {}
    end = 0
    for name, spec in ordered.items():
        start, end = end, end + spec.size_bytes
        relative[name] = (start, end)
        entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (start, end)}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > limits.max_header_bytes:
        raise Malformed(
            "header-too-large", f"the header would have {len(text)} bytes; at most {limits.max_header_bytes} are allowed"
        )
    data_start = LENGTH_BYTES + len(text)
    spans = {name: (data_start + start, data_start + stop) for name, (start, stop) in relative.items()}
    return Layout(ordered, spans, data_start, data_start + end, len(text).to_bytes(LENGTH_BYTES, "little") + text)


def header_bytes(prefix: bytes | memoryview, size: int, limits: Limits, who: str) -> int:
    """Return how many bytes of JSON follow the first 8 bytes of a blob of `size` bytes. Call it before reading them.

    Raises:
        LimitExceeded: The blob is too large.
        Malformed: header-truncated, header-too-large or misaligned.
    """
    if size > limits.max_blob_bytes:
        raise LimitExceeded(f"{who}: {size} bytes; at most {limits.max_blob_bytes} are allowed (server.max_blob_bytes)")
    if len(prefix) < LENGTH_BYTES:
        raise Malformed("header-truncated", f"{who}: {size} bytes are too few for a safetensors blob; send it again")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > limits.max_header_bytes:
        raise Malformed("header-too-large", f"{who}: header of {length} bytes; at most {limits.max_header_bytes} are allowed")
    if length > size - LENGTH_BYTES:
        raise Malformed("header-truncated", f"{who}: header of {length} bytes in a blob of {size}; send it again")
    if length % 8:
        raise Malformed(
            "misaligned", f"{who}: header of {length} bytes is not padded to a multiple of 8; write it with safetensors >= 0.3"
        )
    return length


def parse_header(text: bytes, size: int, limits: Limits, who: str) -> Layout:
    """Return the layout of a blob of `size` bytes after checking every claim of its header. No tensor bytes are read.

    Devices of one federation send the same few headers again and again, so good ones are cached.

    Args:
        text: The JSON without its length.
        size: Bytes of the whole blob.
        limits: Limits to check.
        who: The sender, for errors, such as "update of device kiel".

    Raises:
        Malformed: The header is wrong. No input raises another error.
    """
    if len(text) > REMEMBERED_BYTES:
        return _parsed(text, size, limits, who)
    key = text, size, limits
    if (known := _good.get(key)) is None:
        known = _parsed(text, size, limits, who)
        if len(_good) >= REMEMBERED:
            _good.clear()
        _good[key] = known
    return known


def _parsed(text: bytes, size: int, limits: Limits, who: str) -> Layout:
    data_start = LENGTH_BYTES + len(text)
    entries = _parse_json(text, limits, who)
    _check_metadata(entries.pop(METADATA, {}), who)
    if len(entries) > limits.max_tensors:
        raise Malformed("too-many-tensors", f"{who}: {len(entries)} tensors; at most {limits.max_tensors} are allowed")
    claims: list[tuple[int, int, str, TensorSpec]] = []
    for name, entry in entries.items():
        _check_name(name, limits, who)
        claims.append(_entry(name, entry, who))
    claims.sort(key=lambda item: item[:2])
    _check_spans(claims, size - data_start, who)
    manifest = {name: spec for _, _, name, spec in claims}
    spans = {name: (data_start + start, data_start + end) for start, end, name, _ in claims}
    return Layout(manifest, spans, data_start, size)


def layout_in(blob: memoryview, limits: Limits, who: str) -> Layout:
    """Return the checked layout of a blob in memory.

    Raises:
        Malformed: As in parse_header.
    """
    length = header_bytes(blob[:LENGTH_BYTES], len(blob), limits, who)
    return parse_header(bytes(blob[LENGTH_BYTES : LENGTH_BYTES + length]), len(blob), limits, who)


def _check_skeleton(text: bytes, limits: Limits, who: str) -> None:
    """Check depth and number of members on the text without its strings, before a parser allocates memory for them."""
    if text.count(b'"') > _QUOTES_PER_TENSOR * limits.max_tensors + _FEW_TENSORS_SLACK:
        raise Malformed("header-too-long", f"{who}: more strings than {limits.max_tensors} tensors need")
    skeleton = _STRING.sub(b"", text.replace(b"\\\\", b"").replace(b'\\"', b""))
    rest = skeleton.translate(None, _NOT_BRACKETS)
    if rest.count(b"{") > limits.max_tensors + 2:  # the outermost object and the metadata
        raise Malformed("too-many-tensors", f"{who}: more than {limits.max_tensors} tensors")
    for mark, per_tensor in ((b":", 4), (b"[", 2), (b",", 4 + _NUMBERS_PER_TENSOR)):
        if skeleton.count(mark) > per_tensor * limits.max_tensors + _FEW_TENSORS_SLACK:
            raise Malformed("header-too-long", f"{who}: more of {mark.decode()!r} than {limits.max_tensors} tensors need")
    for _ in range(_DEPTH):
        rest = _LEAF.sub(b"", rest)
    if _LEAF.search(rest) or _OPENERS.search(rest):
        raise Malformed("header-too-deep", f"{who}: the header is nested deeper than {_DEPTH} levels")
    if rest:
        raise Malformed("header-not-json", f"{who}: brackets in the header do not match")


def _parse_json(text: bytes, limits: Limits, who: str) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise Malformed(
            "header-not-json", f"{who}: the header does not begin with an opening brace; is this a safetensors file?"
        )
    _check_skeleton(text, limits, who)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise Malformed("duplicate-key", f"{who}: the header has {_show(twice)} twice")
        return members

    try:
        parsed: dict[str, Any] = json.loads(text.decode(), object_pairs_hook=unique)
    except ValueError as error:  # UnicodeDecodeError, JSONDecodeError, and whole numbers of thousands of digits
        raise Malformed("header-not-json", f"{who}: the header is not JSON ({type(error).__name__}); send it again") from None
    return parsed


def _check_metadata(value: Any, who: str) -> None:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Malformed("bad-metadata", f"{who}: {METADATA} is not an object of strings")


def _entry(name: str, entry: Any, who: str) -> tuple[int, int, str, TensorSpec]:
    if not isinstance(entry, dict) or entry.keys() != _MEMBERS:
        raise Malformed(
            "bad-entry", f"{who}: the entry of {_show(name)} is not an object of exactly dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    spec = _check_spec(name, dtype, shape, who)
    # bool is a subclass of int, hence the exact type
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(x) is int and 0 <= x <= _INT63 for x in offsets):
        raise Malformed("bad-offsets", f"{who}: the data_offsets of {_show(name)} are not two whole numbers >= 0")
    start, end = offsets
    if end < start:
        raise Malformed("bad-offsets", f"{who}: the data_offsets of {_show(name)} run backwards: {start}, {end}")
    if end - start != spec.size_bytes:
        raise Malformed(
            "size-mismatch", f"{who}: {_show(name)} has {end - start} bytes; {dtype} {str(shape)[:80]} needs {spec.size_bytes}"
        )
    if start % ITEM_BYTES[spec.dtype]:
        raise Malformed("misaligned", f"{who}: {_show(name)} starts at {start}, not at a multiple of {ITEM_BYTES[spec.dtype]}")
    return start, end, name, spec


def _check_spec(name: str, dtype: Any, shape: Any, who: str = "writing") -> TensorSpec:
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise Malformed("unknown-dtype", f"{who}: {_show(name)} has dtype {_show(dtype)}; known are {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or not all(type(x) is int and x >= 0 for x in shape):
        raise Malformed("bad-shape", f"{who}: the shape of {_show(name)} is not a list of whole numbers >= 0")
    # Zeros are left out: torch counts strides as if they were ones, and those overflow too.
    if len(shape) > MAX_RANK or max(shape, default=0) > _INT63 or math.prod(x or 1 for x in shape) * 8 > _INT63:
        raise Malformed("shape-too-large", f"{who}: the shape of {_show(name)} has over {MAX_RANK} dimensions or 2^63 bytes")
    return TensorSpec(dtype, tuple(shape))


def _check_spans(claims: list[tuple[int, int, str, TensorSpec]], data_bytes: int, who: str) -> None:
    """Check that tensors, sorted by offset, cover the data exactly once."""
    last = 0
    for start, end, name, _ in claims:
        if start < last:
            raise Malformed(
                "overlap", f"{who}: {_show(name)} begins at {start}, inside the tensor before it, which ends at {last}"
            )
        if start > last:
            raise Malformed("gap", f"{who}: {start - last} bytes before {_show(name)} belong to no tensor")
        last = end
    if last > data_bytes:
        raise Malformed(
            "out-of-range", f"{who}: the tensors need {last} bytes of data, the blob has {data_bytes}; send it again"
        )
    if last < data_bytes:
        raise Malformed("trailing-bytes", f"{who}: {data_bytes - last} bytes behind the last tensor")


def _check_name(name: str, limits: Limits, who: str = "writing") -> None:
    if len(name.encode(errors="surrogatepass")) > limits.max_name_bytes:
        raise Malformed("name-too-long", f"{who}: a tensor name has over {limits.max_name_bytes} bytes: {_show(name)}")
    if not name or name == METADATA or _FORBIDDEN.search(name):
        raise Malformed("bad-name", f"{who}: {_show(name)} cannot name a tensor")


def _show(value: Any) -> str:
    """Return a peer's value for an error: short, printable, ASCII. Errors travel in gRPC metadata and end in logs."""
    return ascii(value[:80])[:120] if isinstance(value, str) else f"a {type(value).__name__}"


class ByManifest(Mapping[str, T]):
    """Values under the names of a manifest, in its order; a subclass reads or computes a value at each access."""

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Dtype and shape of each tensor."""

    def __contains__(self, name: object) -> bool:
        return name in self.manifest  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest)

    def __len__(self) -> int:
        return len(self.manifest)


class Opened(ByManifest[T]):
    """A blob whose header is read and checked. It owns its source and closes it. Errors are those of parse_header."""

    def __init__(self, where: Path | Readable, limits: Limits | None = None) -> None:
        self._source: Readable = LocalFile(where) if isinstance(where, Path) else where
        self._name = self._source.name
        try:
            self._layout = self._read_layout(limits or Limits())
        except BaseException:
            self.close()
            raise

    def _read_layout(self, limits: Limits) -> Layout:
        size, first = self._source.size, self._source.read(0, FIRST_BYTES)
        length = header_bytes(first[:LENGTH_BYTES], size, limits, self._name)
        text = first[LENGTH_BYTES : LENGTH_BYTES + length]
        if len(text) < length:
            rest = bytearray(length)
            self._source.read_into(memoryview(rest), LENGTH_BYTES)
            text = bytes(rest)
        return parse_header(text, size, limits, self._name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, {len(self)} tensors, {self._layout.size} bytes)"

    @property
    def manifest(self) -> Manifest:
        return self._layout.manifest

    def close(self) -> None:
        """Close the blob. Closing twice is allowed; reading afterwards raises OSError."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_manifest(actual: Mapping[str, TensorSpec], expected: Mapping[str, TensorSpec], who: str) -> None:
    """Check that two manifests agree. The order of names does not count.

    Raises:
        Malformed: missing-tensor, unexpected-tensor, wrong-dtype or wrong-shape; the message names `who` and the first tensor.
    """
    if actual == expected:
        return
    if missing := sorted(expected.keys() - actual.keys()):
        raise Malformed("missing-tensor", f"{who}: {_first(missing)} missing; both sides must run the same model")
    if unexpected := sorted(actual.keys() - expected.keys()):
        raise Malformed("unexpected-tensor", f"{who}: {_first(unexpected)} not expected; both sides must run the same model")
    for name, spec in sorted(expected.items()):
        check_spec(name, actual[name], spec, who)


def check_spec(name: str, actual: TensorSpec, expected: TensorSpec, who: str) -> None:
    """Check the dtype and the shape of one tensor.

    Raises:
        Malformed: wrong-dtype or wrong-shape.
    """
    if actual.dtype != expected.dtype:
        raise Malformed("wrong-dtype", f"{who}: {name!r} is {actual.dtype}; {expected.dtype} was expected")
    if actual.shape != expected.shape:
        raise Malformed("wrong-shape", f"{who}: {name!r} has shape {list(actual.shape)}; {list(expected.shape)} was expected")


def _first(names: list[str]) -> str:
    return f"{names[0][:80]!a} is" if len(names) == 1 else f"{names[0][:80]!a} and {len(names) - 1} more are"
