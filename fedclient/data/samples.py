"""Samples of a table: the columns that are features, those to predict, and the samples for testing.

N samples, F features.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError, ShardError
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.table import DataTable
from attune.fedclient.read_options import ReadOptions

SPLIT = "split"  # usual name of the column that marks the samples for testing
TRAINING = {"train", "training", "val", "valid", "validation", "dev"}  # each device chooses its validation samples itself
TESTING = {"test", "testing"}

Mask = npt.NDArray[np.bool_]


def samples_of(table: DataTable, options: ReadOptions) -> tuple[Array, Array, Mask | None, list[str]]:
    """Return a table's features, labels, test samples and names of features.

    Returns:
        x: Features, (N, F) float32.
        y: As `outputs_of`.
        test: Mask of the samples for testing, (N,), or None if no column marks them.
        names: Names of the F columns of x.

    Raises:
        ShardError: A cell cannot be used, or no column is left for features.
        SettingError: A column does not exist, or is both label and feature.
    """
    outputs, split = [table.label_column(name) for name in options.labels()], split_column(table, options)
    apart = {*outputs, *options.apart, *filter(None, (split, options.group))}
    table.require(*options.apart, *options.columns)
    for name in outputs:
        if name in options.columns:
            raise SettingError(f"--columns names {name!r}, the class of {table.path}: it cannot be a feature too")
    features = list(options.columns) or [name for name in table.names if name not in apart]
    if not features:
        raise ShardError(f"{table.path} has no column left for features beside {', '.join(sorted(apart))}")
    x = np.column_stack([table.numbers(name) for name in features]).astype(np.float32)
    return x, outputs_of(table, options), _testing(table, split) if split else None, features


def outputs_of(table: DataTable, options: ReadOptions) -> Array:
    """Return y of a table: the classes, (N,), or in other tasks the numbers of the K given columns, (N, K).

    Raises:
        ShardError: A cell cannot be used, or is empty.
        SettingError: A column does not exist.
    """
    outputs = [table.label_column(name) for name in options.labels()]
    if options.task == "classes":
        return table.classes(outputs[0])
    numbers = np.column_stack([table.numbers(name) for name in outputs])
    if gaps := int(np.isnan(numbers).any(axis=1).sum()):
        raise ShardError(f"{gaps} samples of {table.path} lack a value of {', '.join(outputs)}; leave them out")
    return numbers


def split_column(table: DataTable, options: ReadOptions) -> str:
    """Return the name of the column that marks the samples for testing, or "" if there is none.

    Raises:
        SettingError: The column that the options name does not exist.
    """
    if options.split:
        table.require(options.split)
        return options.split
    taken = {options.label, *options.apart, *options.columns}
    candidates = [name for name in table.names if name.lower() == SPLIT and name not in taken]
    known = TRAINING | TESTING
    return next((name for name in candidates if all(word.lower() in known for word in table.text(name))), "")


def training_and_test(table: DataTable, options: ReadOptions) -> tuple[DataTable, DataTable | None]:
    """Return the samples for training and those for testing as two tables; the second is None if no column marks them.

    Raises:
        ShardError: The column that marks them has other words than those for training and testing.
        SettingError: The column that the options name does not exist.
    """
    split = split_column(table, options)
    if not split:
        return table, None
    test_N = _testing(table, split)

    def taken(places: npt.NDArray[np.intp]) -> DataTable:
        return DataTable(table.path, {name: [cells[at] for at in places] for name, cells in table.cells.items()})

    return taken(np.flatnonzero(~test_N)), taken(np.flatnonzero(test_N))


def _testing(table: DataTable, split: str) -> Mask:
    words = [word.lower() for word in table.text(split)]
    strange = next((word for word in words if word not in TRAINING | TESTING), None)
    if strange is not None:
        raise ShardError(
            f"column {split!r} of {table.path} says {strange[:80]!r}; for every sample it must say one of "
            f"{', '.join(sorted(TRAINING | TESTING))}"
        )
    return np.array([word in TESTING for word in words])
