"""Bounds what the C library keeps of freed memory: a round's tensors go back to the system when the round is over.

By default glibc gives each thread a heap of its own and, once a large block was freed, takes the next one of that size from a
heap too; with four devices and 100 MB of weights it kept four times the model.
"""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
ARENAS = 2
KEPT_BYTES = 4 << 20  # free at the end of a heap, for the next frames: a page that went back is cleared when it comes again
# torch asks Linux for pages of 2 MiB if it finds this when it makes its first tensor: a round of 4 x 25 M parameters takes a
# tenth less of the server's processor time. On devices it was the other way round.
LARGE_PAGES = ("THP_MEM_ALLOC_ENABLE", "1")  # an environment variable
OWN_MAPPING_BYTES = 4 << 20  # larger blocks (tensors) are mapped by themselves; frames are smaller and are reused


def prepare() -> None:
    """How the server takes memory: before the first thread starts and torch makes a tensor."""
    bound_heaps()
    os.environ.setdefault(*LARGE_PAGES)


def bound_heaps() -> None:
    """Before the first thread starts. Does nothing where the C library is another."""
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(M_ARENA_MAX, ARENAS)
        library.mallopt(M_MMAP_THRESHOLD, OWN_MAPPING_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
