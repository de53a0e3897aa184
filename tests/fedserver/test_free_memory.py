"""Memory of blocks that were freed between blocks in use goes back to the system when it is asked for."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from attune.fedserver.process import ENROLLING_MAPPING_BYTES, map_blocks, return_free_memory

BLOCKS, BLOCK_BYTES = 4000, 8 << 10
NOT_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in other ways")
LEAST_BYTES_OF_GLIBC = 128 << 10  # from which it maps blocks, where nobody says otherwise


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return library


@NOT_GLIBC
def test_free_pages_between_blocks_in_use_go_back() -> None:
    library = c_library()
    blocks = [library.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:  # the last one keeps the end of the heap in use
        library.free(block)
    before = resident_bytes()
    return_free_memory()
    library.free(blocks[-1])
    assert before - resident_bytes() > BLOCKS * BLOCK_BYTES // 2


@NOT_GLIBC
def test_a_mapped_block_takes_memory_only_where_it_is_written_to() -> None:
    """Free blocks that were written to, and take as many larger ones of which one page each is written to."""
    library, more_bytes = c_library(), ENROLLING_MAPPING_BYTES + 1024
    taken = {}
    for least_bytes in (1 << 20, ENROLLING_MAPPING_BYTES):
        map_blocks(least_bytes)
        written = [library.malloc(more_bytes) for _ in range(1000)]
        for block in written:
            ctypes.memset(block, 1, more_bytes)
        kept = library.malloc(more_bytes)  # keeps the end of the heap in use
        for block in written:
            library.free(block)
        blocks = [library.malloc(more_bytes) for _ in range(1000)]
        for block in blocks:
            ctypes.memset(block, 1, 1)
        taken[least_bytes] = resident_bytes()
        for block in [*blocks, kept]:
            library.free(block)
        return_free_memory()
    map_blocks(LEAST_BYTES_OF_GLIBC)
    assert taken[1 << 20] - taken[ENROLLING_MAPPING_BYTES] > 500 * more_bytes
