"""What operators are told about the sizes of changes in a masked sum."""

from __future__ import annotations

import pytest

from attune.fedserver.core.messages import SummedChanges


@pytest.mark.parametrize(
    ("above", "told"),
    [
        (
            {"shared": (20, 20, 12, 3, 1, 0, 0)},
            "3 of 20 devices clipped their update in round 7; privacy.secure_clip = 2, and no number changed by more than 8",
        ),
        (
            {"shared": (9, 9, 9, 9, 9, 9, 4)},
            "9 of 20 devices clipped their update in round 7; privacy.secure_clip = 2, and some changed by more than 16",
        ),
        (
            {"shared": (0,) * 7},
            "0 of 20 devices clipped their update in round 7; privacy.secure_clip = 2, and no number changed by more than 0.25",
        ),
        (
            {"shared": (5, 4, 3, 2, 0, 0, 0), "generated": (6, 0, 0, 0, 0, 0, 0)},
            "2 of 20 devices clipped their update in round 7; privacy.secure_clip = 2, and no number changed by more than 4",
        ),
    ],
)
def test_the_operator_is_told_who_clipped_and_which_bound_would_cut_nothing(
    above: dict[str, tuple[int, ...]], told: str
) -> None:
    assert SummedChanges(7, 20, above).told(2.0) == told
