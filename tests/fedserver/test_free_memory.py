"""Memory of blocks that were freed between blocks in use goes back to the system when it is asked for."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from attune.fedserver.process import ENROLLING_MAPPING_BYTES, map_blocks, return_free_memory

BLOCKS, BLOCK_BYTES = 4000, 8 << 10
NOT_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in other ways")
ROOT = Path(__file__).resolve().parents[2]
HERE = os.environ | {"PYTHONPATH": f"{ROOT / '.package'}:{ROOT}"}


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


def taken_by_new_blocks(least_bytes: int) -> int:
    """Free blocks that were written to, take as many again of which one page each is written to, and return what those take."""
    library, block_bytes = c_library(), ENROLLING_MAPPING_BYTES + 1024
    map_blocks(least_bytes)
    before = resident_bytes()
    written = [library.malloc(block_bytes) for _ in range(BLOCKS)]
    for block in written:
        ctypes.memset(block, 1, block_bytes)
    library.malloc(block_bytes)  # keeps the end of the heap in use
    for block in written:
        library.free(block)
    for _ in range(BLOCKS):
        ctypes.memset(library.malloc(block_bytes), 1, 1)
    return resident_bytes() - before


@NOT_GLIBC
def test_a_mapped_block_takes_memory_only_where_it_is_written_to() -> None:
    """Use a process for each way, because the heap of this one has other free blocks."""
    taken = []
    for least_bytes in (1 << 20, ENROLLING_MAPPING_BYTES):
        code = f"from tests.fedserver.test_free_memory import taken_by_new_blocks as taken; print(taken({least_bytes}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=HERE)
        taken.append(int(done.stdout))
    assert taken[0] > BLOCKS * ENROLLING_MAPPING_BYTES
    assert taken[1] < taken[0] / 2
