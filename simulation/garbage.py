"""Python's collector of cycles, kept from looking at everything again and again while many small objects come and go."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 50_000  # that are new, before a look at the new ones; Python's own number is 700


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, what exists already is not looked at, and new objects seldom. Nothing of it stays afterwards.

    A round makes some hundred objects a device, nearly none of them in cycles. To look at all of torch's and Python's own
    took a fifth of a round of small models.
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
