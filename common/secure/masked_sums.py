"""Masked sums: statistics of a site as one whole number that masks hide. A server learns the sum over the sites alone.

Each count and each sum has a slot of fixed width in the number. No slot can overflow, whatever up to MOST_MEMBERS honest
devices add. So the sum of the numbers holds the sum of each slot, exactly. A layout says what the slots are
(attune.common.site_statistics.MaskedLayout). The server makes it before it knows any sum, and it is part of what devices sign:
devices with different layouts have no sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from attune.common.errors import UpdateRefused
from attune.common.protocol import MOST_MEMBERS
from attune.common.secure import masks
from attune.common.site_statistics import COUNT_BYTES, WIDE_BYTES, MaskedLayout

MOST_ROWS = (1 << 8 * COUNT_BYTES) // MOST_MEMBERS - 1  # of a device
FRACTION_BITS = 80  # of a sum: each device's is rounded to a multiple of 2^-80
_OFFSET = 1 << 8 * WIDE_BYTES - 9  # makes sums of a device positive
ONE_SUM = 1  # stands where a round's number does: a device hands in to one sum of its statistics
SlotValue = int | Fraction


def packed(layout: MaskedLayout, slots: Sequence[int | float | Fraction]) -> bytes:
    """Return a device's number, little-endian.

    Args:
        layout: The layout.
        slots: A whole number for each count, and a number for each sum, which is rounded to a multiple of 2^-FRACTION_BITS.

    Raises:
        UpdateRefused: A count or a sum is too large to be added to others.
    """
    pieces = []
    for is_wide, value in zip(layout.is_wide(), slots, strict=True):
        if not is_wide:
            if not 0 <= value <= MOST_ROWS:
                raise UpdateRefused(f"its data have counts above {MOST_ROWS:,}, which no masked sum has room for")
            pieces.append(int(value).to_bytes(COUNT_BYTES, "little"))
            continue
        scaled = round(Fraction(value) * (1 << FRACTION_BITS)) if math.isfinite(value) else _OFFSET
        if abs(scaled) >= _OFFSET:
            raise UpdateRefused("its data have numbers too large for a masked sum")
        pieces.append((scaled + _OFFSET).to_bytes(WIDE_BYTES, "little"))
    return b"".join(pieces)


def unpacked(layout: MaskedLayout, total: bytes, devices: int) -> list[SlotValue]:
    """Return the sums over so many devices, exactly as they were added."""
    values: list[SlotValue] = []
    start = 0
    for is_wide in layout.is_wide():
        end = start + (WIDE_BYTES if is_wide else COUNT_BYTES)
        number = int.from_bytes(total[start:end], "little")
        values.append(Fraction(number - devices * _OFFSET, 1 << FRACTION_BITS) if is_wide else number)
        start = end
    return values


def plus_masks(number: bytes, seeds: Sequence[tuple[bytes, bool]], purpose: str = "statistics") -> bytes:
    """Return a number with masks added, modulo 256^len(number).

    Args:
        number: Little-endian.
        seeds: Seed of each mask, and whether it is subtracted.
        purpose: What the number is; numbers of one purpose have the same masks.
    """
    total = int.from_bytes(number, "little")
    for seed, subtract in seeds:
        mask = int.from_bytes(masks.stream(seed, purpose, len(number)), "little")
        total += -mask if subtract else mask
    return (total % (1 << 8 * len(number))).to_bytes(len(number), "little")


def added(one: bytes, other: bytes) -> bytes:
    """Return the sum of two masked numbers of the same length."""
    total = int.from_bytes(one, "little") + int.from_bytes(other, "little")
    return (total % (1 << 8 * len(one))).to_bytes(len(one), "little")
