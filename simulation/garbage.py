"""Less frequent garbage collection, for code that makes and drops many small objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 50_000  # new objects before a collection of the youngest generation; Python's default is 700


@contextmanager
def rare_collection() -> Iterator[None]:
    """Make garbage collection rare during the block, and skip the objects that exist at its beginning.

    A round makes some hundred objects for each device, and few of them are in cycles. With Python's defaults, looking at all
    objects of torch and Python again and again took a fifth of a round of small models.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    if before[0]:
        gc.set_threshold(max(OBJECTS, before[0]), *before[1:])
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()
