"""Shares of the process's file descriptors: connections of devices, connections to the page, and a reserve for files."""

from __future__ import annotations

import contextlib
import resource

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
