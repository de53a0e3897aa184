"""The server's process: the packages that it needs, how the C library keeps memory, and its file descriptors.

By default glibc gives each thread a heap of its own. Once a large block was freed, it takes the next one of that size from a
heap too. With four devices and 100 MB of weights the process kept four times the model. With bounded heaps, the memory of a
round's tensors goes back to the system when the round is over.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
from importlib.util import find_spec

from attune.common.errors import SettingError
from attune.seams import features

SERVER_PACKAGES = ("grpc_health", "grpc_reflection")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
ARENAS = 2
KEPT_BYTES = 4 << 20  # kept free at the end of a heap for the next frames: the system must clear each page that it gives anew
# torch asks Linux for pages of 2 MiB if it finds this when it makes its first tensor: a round of 4 x 25 M parameters takes a
# tenth less of the server's processor time. On devices it was the other way round.
LARGE_PAGES = ("THP_MEM_ALLOC_ENABLE", "1")  # an environment variable
OWN_MAPPING_BYTES = 4 << 20  # larger blocks (tensors) are mapped by themselves; frames are smaller and are reused
ENROLLING_MAPPING_BYTES = 16 << 10  # the same while devices enrol, so that TLS's two buffers of 17 KiB a connection are mapped
MOST_MAPPINGS = 1 << 15  # half of what Linux allows a process


def check_installed() -> None:
    """Check that the packages are installed that only a server needs, or a page of it.

    Raises:
        SettingError: One of them is missing.
    """
    needed = (*SERVER_PACKAGES, *(package for feature in features() for package in feature.packages))
    if missing := [name for name in needed if find_spec(name) is None]:
        raise SettingError(f"a server needs {', '.join(missing)}, not installed here: pip install 'attune-fl[server]'")


def prepare_memory() -> None:
    """Set how the server takes memory. Call it before the first thread starts and torch makes a tensor."""
    bound_heaps()
    os.environ.setdefault(*LARGE_PAGES)


def bound_heaps() -> None:
    """Bound the heaps of the C library. Call it before the first thread starts. No-op with another library than glibc."""
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(M_ARENA_MAX, ARENAS)
        library.mallopt(M_MMAP_MAX, MOST_MAPPINGS)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        map_blocks(OWN_MAPPING_BYTES)


def map_blocks(least_bytes: int) -> None:
    """Let the C library map blocks of at least so many bytes by themselves. No-op with another library than glibc.

    A mapped block takes memory only for the pages that are written to, and they go back at once when it is freed. A smaller
    block lies on pages that were written to before.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, least_bytes)


def keep_what_has_begun() -> None:
    """Take the objects of now out of Python's garbage collection, which then needs a tenth of the time.

    A refused call is a cycle of references, so under a flood of calls the collection decides how much memory they hold.
    """
    gc.collect()
    gc.freeze()


# --- file descriptors: connections of devices, connections to the page, and a reserve for files

MOST = 65536  # the limit is raised to this, if the system allows it
RESERVED = 64  # descriptors for the database, blobs and logs; and an eighth of the limit for transfers
FEWEST_OF_PAGE, MOST_OF_PAGE = 16, 64


def raise_limit() -> int:
    """Ask for more descriptors, and return how many this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def limit() -> int:
    """Return how many descriptors this process may have."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)


def device_connections(descriptors: int) -> int:
    """Return how many connections of devices there may be.

    The page gets twice its connections, because those that are dropped need a moment to close.
    """
    return max(16, descriptors - RESERVED - descriptors // 8 - 2 * page_connections(descriptors))


def page_connections(descriptors: int) -> int:
    """Return how many connections to the page there may be."""
    return max(FEWEST_OF_PAGE, min(MOST_OF_PAGE, descriptors // 16))
