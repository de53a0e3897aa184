"""Ranges of objects on a worker: any range has the bytes of the blob, and other bytes in its chunks are found."""

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common.wire.blobs import Buffer
from attune.common.wire.digest import digest_of
from attune.common.wire.malformed import Truncated
from attune.features.remote.s3_objects import CHUNK_BYTES, digests_in
from attune.fedserver.ports.blobs import Damaged

pytest.importorskip("obstore")

from attune.features.remote.object_source import ObjectPlace, ObjectRanges, RangeSource

DATA = random.Random(1).randbytes(3 * CHUNK_BYTES + 1000)


class OneObject:
    """A store in memory with one object."""

    url = "s3://bucket/prefix"

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, list[tuple[int, int]]()

    def size(self, key: str) -> int:
        return len(self.data)

    def range(self, key: str, start: int, length: int) -> memoryview:
        self.asked.append((start, length))
        return memoryview(self.data)[start : start + length]


def source_of(store: OneObject) -> RangeSource:
    chunks = digests_in(Buffer("", DATA))[1]
    return RangeSource(ObjectRanges(store), ObjectPlace("key", "inbox/x", len(DATA), chunks))  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, len(DATA)])
def test_the_digests_are_those_of_all_bytes_and_of_each_chunk(size: int) -> None:
    data = DATA[:size]
    by_hand = [hashlib.sha256(data[at : at + CHUNK_BYTES]).digest() for at in range(0, size, CHUNK_BYTES)]
    assert digests_in(Buffer("", data)) == (digest_of(data), b"".join(by_hand))


@given(st.lists(st.tuples(st.integers(0, len(DATA)), st.integers(0, len(DATA))), max_size=6))
def test_every_range_has_the_bytes_of_the_blob(ranges: list[tuple[int, int]]) -> None:
    source = source_of(OneObject(DATA))
    for offset, count in ranges:
        assert source.read(offset, count) == DATA[offset : offset + count]
        target = memoryview(bytearray(count))
        if offset + count > len(DATA):
            with pytest.raises(Truncated):
                source.read_into(target, offset)
        else:
            source.read_into(target, offset)
            assert target == DATA[offset : offset + count]


@given(st.integers(0, len(DATA) - 1), st.integers(0, len(DATA) - 1), st.integers(1, len(DATA)))
def test_a_changed_byte_is_found_by_each_reading_of_its_chunk_and_no_other(at: int, offset: int, count: int) -> None:
    changed = bytearray(DATA)
    changed[at] ^= 1
    source = source_of(OneObject(bytes(changed)))
    end = min(offset + count, len(DATA))
    if offset // CHUNK_BYTES <= at // CHUNK_BYTES <= (end - 1) // CHUNK_BYTES:
        with pytest.raises(Damaged, match=r"inbox/x is damaged in s3://bucket/prefix"):
            source.read(offset, count)
    else:
        assert source.read(offset, count) == DATA[offset:end]


def test_small_tensors_beside_each_other_are_read_once() -> None:
    store = OneObject(DATA)
    source = source_of(store)
    for offset in range(100, CHUNK_BYTES - 500, 1000):
        source.read(offset, 500)
    assert store.asked == [(0, CHUNK_BYTES)]
