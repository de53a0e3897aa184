"""Statistics as whole numbers: hand-worked slots, exact sums, and masks that cancel."""

import os
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common.errors import UpdateRefused
from attune.common.protocol import MOST_MEMBERS
from attune.common.secure.masked_sums import (
    FRACTION_BITS,
    MOST_ROWS,
    added,
    packed,
    plus_masks,
    unpacked,
)
from attune.common.site_statistics import BUCKETS, COUNT_BYTES, WIDE_BYTES, Centre, MaskedLayout

LAYOUT = MaskedLayout("fed", {}, ["a", "b"], ["x"])  # samples, two classes, rows, two sums, rows


def test_slots_lie_one_after_the_other_with_a_positive_offset() -> None:
    number = packed(LAYOUT, [7, 3, 4, 7, -1.5, 2.25, 0])
    assert len(number) == LAYOUT.size == 5 * COUNT_BYTES + 2 * WIDE_BYTES
    assert number[:5] == bytes([7, 0, 0, 0, 0]) and number[5:10] == bytes([3, 0, 0, 0, 0])
    first = int.from_bytes(number[20 : 20 + WIDE_BYTES], "little")
    assert first == 2**247 - 3 * 2**79, "-1.5 in units of 2^-80, and the offset"
    assert unpacked(LAYOUT, number, 1) == [7, 3, 4, 7, Fraction(-3, 2), Fraction(9, 4), 0]


def test_every_column_has_room_for_its_buckets() -> None:
    layout = MaskedLayout("fed", {"age": Centre(0.0, 1.0)})
    assert sum(1 for _ in layout.is_wide()) == 1 + 5 + 2 * BUCKETS + 1 + 2
    assert layout.size == COUNT_BYTES * (1 + 2 + 2 * BUCKETS + 1 + 2) + WIDE_BYTES * 3


WHOLE = st.integers(-(2**53), 2**53).map(float)
COUNTS = st.integers(0, MOST_ROWS)


@given(st.lists(st.tuples(COUNTS, WHOLE), min_size=1, max_size=8))
def test_sums_of_whole_numbers_are_exact_behind_masks(devices: list[tuple[int, float]]) -> None:
    """Each pair of devices has a mask that one adds and the other subtracts, and each device one that the server takes off."""
    seeds = {(one, other): os.urandom(31) for one in range(len(devices)) for other in range(one, len(devices))}
    total = bytes(LAYOUT.size)
    for at, (count, value) in enumerate(devices):
        mine = [(seed, at != one and at == other) for (one, other), seed in seeds.items() if at in (one, other)]
        total = added(total, plus_masks(packed(LAYOUT, [count, 0, 0, 1, value, value, 0]), mine))
    plain = plus_masks(total, [(seed, True) for (one, other), seed in seeds.items() if one == other])
    slots = unpacked(LAYOUT, plain, len(devices))
    assert slots[0] == sum(count for count, _ in devices)
    assert slots[4] == sum(Fraction(value) for _, value in devices)


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=6))
def test_other_sums_are_off_by_half_a_step_for_each_device(values: list[float]) -> None:
    total = bytes(LAYOUT.size)
    for value in values:
        total = added(total, packed(LAYOUT, [0, 0, 0, 0, value, 0.0, 0]))
    error = abs(Fraction(unpacked(LAYOUT, total, len(values))[4]) - sum(map(Fraction, values)))
    assert error <= Fraction(len(values), 2 ** (FRACTION_BITS + 1))


def test_the_largest_numbers_of_the_most_devices_overflow_no_slot() -> None:
    largest = 2.0**166
    total = bytes(LAYOUT.size)
    for _ in range(MOST_MEMBERS):
        total = added(total, packed(LAYOUT, [MOST_ROWS, MOST_ROWS, 0, 1, largest, -largest, 0]))
    slots = unpacked(LAYOUT, total, MOST_MEMBERS)
    assert slots == [MOST_MEMBERS * MOST_ROWS] * 2 + [0, MOST_MEMBERS, Fraction(largest) * 256, Fraction(-largest) * 256, 0]


@pytest.mark.parametrize("value", [2.0**168, float("inf"), float("nan")])
def test_numbers_without_room_are_refused(value: float) -> None:
    with pytest.raises(UpdateRefused, match="too large for a masked sum"):
        packed(LAYOUT, [0, 0, 0, 0, value, 0.0, 0])
    with pytest.raises(UpdateRefused, match="counts above"):
        packed(LAYOUT, [MOST_ROWS + 1, 0, 0, 0, 0.0, 0.0, 0])


def test_a_mask_is_the_keystream_of_its_seed_alone() -> None:
    seed, zero = bytes(31), bytes(LAYOUT.size)
    mask = plus_masks(zero, [(seed, False)])
    assert mask != zero and plus_masks(mask, [(seed, True)]) == zero
    assert plus_masks(zero, [(b"\1" + bytes(30), False)])[:16] != mask[:16]


@pytest.mark.parametrize(
    "layout",
    [
        MaskedLayout("f", {"a": Centre(0.0, 0.0)}),
        MaskedLayout("f", {"a": Centre(float("nan"), 1.0)}),
        MaskedLayout("f", {"a": Centre(0.0, float("inf"))}),
        MaskedLayout("f", features=["x"] * (1 << 16)),
        MaskedLayout("f", {f"c{n}": Centre(0.0, 1.0) for n in range(257)}),
    ],
)
def test_a_layout_that_no_device_can_fill_is_refused(layout: MaskedLayout) -> None:
    with pytest.raises(UpdateRefused, match="masked sum"):
        layout.check()
    LAYOUT.check()


def test_any_change_of_a_layout_changes_what_is_signed() -> None:
    layouts = [
        LAYOUT,
        MaskedLayout("other", {}, ["a", "b"], ["x"]),
        MaskedLayout("fed", {}, ["b", "a"], ["x"]),
        MaskedLayout("fed", {"a": Centre(0.0, 1.0), "b": Centre(0.0, 1.0)}),
        MaskedLayout("fed", {"b": Centre(0.0, 1.0), "a": Centre(0.0, 1.0)}),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)
