"""Memory of blocks that were freed between blocks in use goes back to the system when it is asked for."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

import pytest

from attune.fedserver.process import return_free_memory

BLOCKS, BLOCK_BYTES = 4000, 8 << 10


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in other ways")
def test_free_pages_between_blocks_in_use_go_back() -> None:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [library.malloc(BLOCK_BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK_BYTES)
    for block in blocks[:-1]:  # the last one keeps the end of the heap in use
        library.free(block)
    before = resident_bytes()
    return_free_memory()
    library.free(blocks[-1])
    assert before - resident_bytes() > BLOCKS * BLOCK_BYTES // 2
