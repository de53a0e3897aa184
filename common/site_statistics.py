"""Layout of the numbers that describe the data of sites and are added over devices, clear, masked or noised.

A layout names the columns, and says how each one is counted: in buckets about a centre, in bins over a public range, or by
value. A device makes the same numbers of each column (attune.fedclient.data.site_sums): rows with a value and
without one, the sums of its numbers and of their squares, and the counts. The server makes figures of their sums, with errors
if there is noise (attune.fedserver.surveys.fleet_statistics). There are three ways between them:

- clear: a device's own sums leave it as they are (`SiteSums`), and in a second pass its counts (`SiteSketches`): their buckets
  need the mean and deviation of the whole fleet;
- masked: all numbers are one whole number behind masks (`MaskedLayout`, attune.common.secure.masked_sums);
- noised: all numbers have Gaussian noise (`NoisyLayout`, `NoisySums`).

The widths of buckets follow DDSketch (Masson, Rim and Lee, PVLDB 12, 2019), so sketches of devices are added bucket by bucket,
and a quantile of the sum has a stated error. No value of a single row is sent as it is, as it would be in a sketch that keeps
samples. A server that lies about the centre can still read values from narrow buckets: a device must trust it.

With noise the unit is a sample, or a group of them, such as one patient's rows. A device adds up one vector for each unit, adds
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
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from attune.common.errors import UpdateRefused
from attune.common.task import TIME_AND_EVENT, TaskName

ACCURACY = 0.01  # largest error of a quantile, as a share of the value's distance from the fleet's mean
NEAREST, FARTHEST = 1e-3, 1e6  # deviations from the mean: what is nearer is in bucket 0, what is farther in the last ones
MOST_COLUMNS = 256  # in one request
MOST_BYTES = 3 << 20  # of a report; a message of gRPC may have 4 MiB
GROWTH = math.log((1 + ACCURACY) / (1 - ACCURACY))  # logarithm of the ratio of two neighbouring buckets' ends
FIRST_STEP = math.ceil(math.log(NEAREST) / GROWTH)
BUCKETS = math.ceil(math.log(FARTHEST) / GROWTH) - FIRST_STEP  # on each side of bucket 0
COUNT_BYTES, WIDE_BYTES = 5, 32  # of a count and of a sum in a masked number
LARGEST = 1e100  # of a centre
BINS = 20  # of a number with a range, of one width
MOMENTS = 3  # places of a number before its bins: count, sum of v and sum of v^2
MOST_PLACES = 1 << 16  # of one noisy release

Count = Annotated[int, msgspec.Meta(ge=0)]


class Centre(msgspec.Struct, frozen=True):
    """Middle of a column's buckets and their unit: mean and deviation over the fleet, or public ones."""

    mean: float
    deviation: float

    @property
    def unit(self) -> tuple[float, float]:
        """Number that is taken from a value, and the one by which it is divided then, before it is summed."""
        return self.mean, 1.0


class NoisyColumn(msgspec.Struct, frozen=True):
    """One column of a release: a number with a public range, or a category with its declared values.

    Attributes:
        range: Lowest and highest number; None: it is a category.
        values: Values of a category, without `other`.
    """

    range: tuple[float, float] | None = None
    values: list[str] = []

    @property
    def unit(self) -> tuple[float, float]:
        """Middle and half of the range, by which a number is scaled to -1 to 1."""
        low, high = self.range or (-2.0, 2.0)
        return (low + high) / 2, (high - low) / 2

    @property
    def centre(self) -> Centre:
        """Centre of buckets over the range, for a masked sum; 0 and 1 without one."""
        middle, half = self.unit
        return Centre(middle, half / 2)

    @property
    def places(self) -> int:
        """How many numbers of the release are its own."""
        return MOMENTS + BINS if self.range is not None else len(self.values) + 1

    @property
    def square(self) -> int:
        """Largest square of the norm of a unit's part of the vector."""
        return 4 if self.range is not None else 1


class _Layout(msgspec.Struct, frozen=True):
    """Layout of masked or of noised sums, for the federation with this fingerprint."""

    federation: str

    @property
    def digest(self) -> str:
        """A digest of the layout: devices sign it, or charge it once and draw their noise for it."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()


class MaskedLayout(_Layout, frozen=True):
    """Slots of a masked number, in order.

    Attributes:
        columns: Centre of the buckets of each column by name; a public one, of a schema's range or 0 and 1.
        classes: Classes that are counted.
        features: Names of the features that have sums over the training part, for a common scale.
        targets: Names of the numbers to predict that have such sums.
    """

    columns: dict[str, Centre] = {}
    classes: list[str] = []
    features: list[str] = []
    targets: list[str] = []

    def check(self) -> None:
        """Check that a device can fill the slots.

        Raises:
            UpdateRefused: There are too many of them, or a centre cannot be.
        """
        fits = all(abs(centre.mean) <= LARGEST and 0 < centre.deviation <= LARGEST for centre in self.columns.values())
        if not fits:
            raise UpdateRefused("the layout of the masked sum cannot be: update the server")
        if len(self.columns) > MOST_COLUMNS or self.size > MOST_BYTES:
            raise UpdateRefused(f"the masked sum has {self.size:,} bytes: ask for fewer columns (--columns)")

    def is_wide(self) -> Iterator[bool]:
        """Yield for each slot whether it is a sum; the others are counts."""
        yield False  # samples
        yield from [False] * len(self.classes)
        for _ in self.columns:
            yield from (False, False, True, True, True)  # rows, missing; sums of x, x^2, and (sum of x)^2 / rows
            yield from [False] * (2 * BUCKETS + 1)
        for names in (self.features, self.targets):
            yield False  # rows
            yield from [True, True] * len(names)  # sums of x and x^2

    @property
    def size(self) -> int:
        """Bytes of the number."""
        return sum(WIDE_BYTES if is_wide else COUNT_BYTES for is_wide in self.is_wide())


class NoisyLayout(_Layout, frozen=True):
    """Everything that one noisy release depends on besides the data. It is public.

    Attributes:
        unit: What is protected.
        epsilon: Cost of the release.
        delta: Chance that the guarantee fails.
        budget: Epsilon of the whole run (`privacy.epsilon`); None: not limited.
        columns: The columns by name, in order.
        classes: Labels that are counted; empty: none.
        format: Version of the layout.
    """

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


class NoisySums(msgspec.Struct, frozen=True):
    """A noisy release.

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


class ColumnSums(msgspec.Struct, frozen=True):
    """Sums of one column over the rows of a site.

    Attributes:
        rows: Rows with a value.
        missing: Rows without one.
        mean: Mean of the values; 0 without any.
        squares: Sum of squared distances from the mean.
    """

    rows: Count
    missing: Count
    mean: float
    squares: float


class SiteSums(msgspec.Struct, frozen=True):
    """Answer of a device in the first pass.

    Attributes:
        samples: Samples of the training and the test part.
        columns: Sums by the name of the column.
        classes: Samples of each class, in the order of the labels in the device's profile; empty for other tasks.
    """

    samples: Count
    columns: dict[str, ColumnSums] = {}
    classes: list[Count] = []


class ColumnSketch(msgspec.Struct, frozen=True):
    """Counts of one site's values by bucket: those from `first` on; negative buckets lie below the fleet's mean."""

    first: int
    counts: list[Count]


class SiteSketches(msgspec.Struct, frozen=True):
    """Answer of a device in the second pass: a sketch by the name of the column."""

    columns: dict[str, ColumnSketch] = {}


def output_columns(task: TaskName, labels: Sequence[int | str]) -> list[str]:
    """Return the names that the columns of y have in statistics; none of classes and labels.

    In survival these are all times, and the times of events: those of other rows are missing there.
    """
    if task == "survival":
        return [f"{what} {label}" for what, label in zip(TIME_AND_EVENT, labels, strict=True)]
    return [f"target {label}" for label in labels] if task == "regression" else []


def bucket_value(bucket: int, centre: Centre) -> float:
    """Return the value that stands for all values of a bucket: its error is ACCURACY of the distance from the mean.

    Bucket 0 stands for values within NEAREST deviations. The last bucket on each side has no bound on its error.
    """
    if bucket == 0:
        return centre.mean
    end = math.exp((abs(bucket) + FIRST_STEP) * GROWTH)
    return centre.mean + math.copysign(end * (1 - ACCURACY), bucket) * (centre.deviation or 1.0)
