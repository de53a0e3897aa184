"""Sums that describe the data of one site before training, and sketches of how its values are distributed.

A fleet's statistics are made in two passes. In the first one a device sends the sums of each column. The second one needs the
mean and deviation of the whole fleet: a device counts its values in buckets that grow with the distance from the fleet's mean.
The widths of the buckets follow DDSketch (Masson, Rim and Lee, PVLDB 12, 2019), so sketches of devices are added bucket by
bucket, and a quantile of the sum has a stated error. No value of a single row is sent as it is, as it would be in a sketch
that keeps samples. A server that lies about the centre can still read values from narrow buckets: a device must trust it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from attune.common.task import TIME_AND_EVENT, TaskName

ACCURACY = 0.01  # largest error of a quantile, as a share of the value's distance from the fleet's mean
NEAREST, FARTHEST = 1e-3, 1e6  # deviations from the mean: what is nearer is in bucket 0, what is farther in the last ones
MOST_COLUMNS = 256  # in one request
GROWTH = math.log((1 + ACCURACY) / (1 - ACCURACY))  # logarithm of the ratio of two neighbouring buckets' ends
FIRST_STEP = math.ceil(math.log(NEAREST) / GROWTH)
BUCKETS = math.ceil(math.log(FARTHEST) / GROWTH) - FIRST_STEP  # on each side of bucket 0

Count = Annotated[int, msgspec.Meta(ge=0)]


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


class Centre(msgspec.Struct, frozen=True):
    """Mean and standard deviation of a column over the whole fleet."""

    mean: float
    deviation: float


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
