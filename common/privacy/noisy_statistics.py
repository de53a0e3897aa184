"""Statistics of a site that leave it with noise: what is released together, and how far one sample can move it.

The unit is a sample, or a group of them, such as one patient's rows. A device adds up one vector for each unit, adds Gaussian
noise to the sum, and releases all of it at once. The vector has its own places for each column:

- of a number, scaled by a public range to v from -1 to 1 (what lies outside counts as the nearest end): 1, v, v^2, and a one
  in the bin of v. The sum of their squares is 1 + v^2 + v^4 + 1, at most 4;
- of a category: a one at its value, or at `other` for all that are not declared. The square is 1;
- of the classes: a one at the label. The square is 1, once.

A missing value has zeros. Places of different columns do not overlap, so their squares add up. The vector of C numbers, D
categories and classes has the L2 norm sqrt(4 C + D + 1) at most. The vector of a group is the mean of its rows' vectors, and a
mean is no longer than the longest of them. If a unit's contribution is replaced by nothing, the sum moves by its vector: that
norm is the sensitivity. v from -1 to 1, instead of 0 to 1, halves the error of a mean at the same norm.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import msgspec

from attune.common.errors import UpdateRefused

BINS = 20  # of a number's histogram, of one width over its range
MOMENTS = 3  # places of a number before its bins: count, sum of v and sum of v^2
MOST_PLACES = 1 << 16  # of one release


class NoisyColumn(msgspec.Struct, frozen=True):
    """One column of a release: a number with a public range, or a category with its declared values.

    Attributes:
        range: Lowest and highest number; None: it is a category.
        values: Values of a category, without `other`.
    """

    range: tuple[float, float] | None = None
    values: list[str] = []

    @property
    def places(self) -> int:
        """How many numbers of the release are its own."""
        return MOMENTS + BINS if self.range is not None else len(self.values) + 1

    @property
    def square(self) -> int:
        """Largest square of the norm of a unit's part of the vector."""
        return 4 if self.range is not None else 1


class NoisyLayout(msgspec.Struct, frozen=True):
    """Everything that one release depends on besides the data. It is public.

    Attributes:
        federation: The federation's fingerprint.
        unit: What is protected.
        epsilon: Cost of the release.
        delta: Chance that the guarantee fails.
        budget: Epsilon of the whole run (`privacy.epsilon`); None: not limited.
        columns: The columns by name, in order.
        classes: Labels that are counted; empty: none.
        format: Version of the layout.
    """

    federation: str
    unit: Literal["example", "group"]
    epsilon: float
    delta: float
    budget: float | None = None
    columns: dict[str, NoisyColumn] = {}
    classes: list[str] = []
    format: int = 1

    def check(self) -> None:
        """Check that a device can fill the places.

        Raises:
            UpdateRefused: It cannot.
        """
        for name, column in self.columns.items():
            low, high = column.range or (0.0, 1.0)
            if not -math.inf < low < high < math.inf or (column.range is None and not column.values):
                raise UpdateRefused(f"the question has neither a range nor values for the column {name[:80]!r}")
        if self.format != 1 or not 0 < self.epsilon < math.inf or not 0 < self.delta < 1:
            raise UpdateRefused("the question for noisy statistics cannot be: update one of the two")
        if not 0 < self.size <= MOST_PLACES:
            raise UpdateRefused(f"the question is for {self.size:,} numbers; 1 to {MOST_PLACES:,} are possible (--columns)")

    @property
    def size(self) -> int:
        """How many numbers are released."""
        return sum(column.places for column in self.columns.values()) + len(self.classes)

    @property
    def norm(self) -> float:
        """Largest L2 norm of one unit's vector, which is the sensitivity of the release."""
        return math.sqrt(sum(column.square for column in self.columns.values()) + bool(self.classes))

    @property
    def digest(self) -> str:
        """A digest of the layout: the device charges it once, and draws its noise for it."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


class NoisySums(msgspec.Struct, frozen=True):
    """A release.

    Attributes:
        units: Samples or groups of the device, a public number.
        deviation: Standard deviation of the noise of each number.
        values: The sums with noise, in the order of the layout's columns, then the classes.
    """

    units: int
    deviation: float
    values: list[float]

    def check(self, layout: NoisyLayout, samples: int) -> None:
        """Check a release of a device that declares so many samples.

        Raises:
            UpdateRefused: It cannot be one.
        """
        largest = samples + 12 * self.deviation  # a sample moves a number by 1; honest noise ends at 10 deviations
        fits = len(self.values) == layout.size and 0 < self.deviation <= 1e9 and 0 <= self.units <= samples
        if not fits or not all(abs(value) <= largest for value in self.values):
            raise UpdateRefused("its noisy sums are not those of the data that it declares")
