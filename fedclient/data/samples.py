"""A table's samples: which columns are features, which one is the class, and which samples are for testing.

N samples, F features.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attune.common.errors import SettingError, ShardError
from attune.fedclient.data.arrays import Array
from attune.fedclient.data.table import DataTable
from attune.fedclient.read_options import ReadOptions

SPLIT = "split"  # the usual name of the column that says which samples are for testing
_TRAINING = {"train", "training", "val", "valid", "validation", "dev"}  # a device holds out samples to validate by itself
_TESTING = {"test", "testing"}

Mask = npt.NDArray[np.bool_]


def samples_of(table: DataTable, options: ReadOptions) -> tuple[Array, Array, Mask | None, list[str]]:
    """(x (N, F) float32, y as `answers_of`, which samples are for testing (N,) or None, names of the F columns).

    Errors: ShardError, SettingError for columns that are not there.
    """
    outputs, split = [table.label_column(name) for name in options.labels()], split_column(table, options)
    apart = {*outputs, *options.apart, *filter(None, (split, options.group))}
    for name in (*options.apart, *options.columns):
        table.require(name)
    for name in outputs:
        if name in options.columns:
            raise SettingError(f"--columns names {name!r}, the class of {table.path}: it cannot be a feature too")
    features = list(options.columns) or [name for name in table.names if name not in apart]
    if not features:
        raise ShardError(f"{table.path} has no column left for features beside {', '.join(sorted(apart))}")
    x = np.column_stack([table.numbers(name) for name in features]).astype(np.float32)
    return x, answers_of(table, options), _testing(table, split) if split else None, features


def answers_of(table: DataTable, options: ReadOptions) -> Array:
    """The classes, (N,), or in other tasks the numbers of each given column, (N, K). Errors: ShardError, SettingError."""
    outputs = [table.label_column(name) for name in options.labels()]
    if options.task == "classes":
        return table.classes(outputs[0])
    found = np.column_stack([table.numbers(name) for name in outputs])
    if gaps := int(np.isnan(found).any(axis=1).sum()):
        raise ShardError(f"{gaps} samples of {table.path} lack a value of {', '.join(outputs)}; leave them out")
    return found


def split_column(table: DataTable, options: ReadOptions) -> str:
    """The column that says which samples are for testing; empty if there is none. Errors: SettingError."""
    if options.split:
        table.require(options.split)
        return options.split
    taken = {options.label, *options.apart, *options.columns}
    found = [name for name in table.names if name.lower() == SPLIT and name not in taken]
    known = _TRAINING | _TESTING
    return next((name for name in found if all(word.lower() in known for word in table.text(name))), "")


def training_and_test(table: DataTable, options: ReadOptions) -> tuple[DataTable, DataTable | None]:
    """The table's samples in two tables, where a column says which are for testing. Errors: ShardError, SettingError."""
    split = split_column(table, options)
    if not split:
        return table, None
    test_N = _testing(table, split)

    def taken(places: npt.NDArray[np.intp]) -> DataTable:
        return DataTable(table.path, {name: [cells[at] for at in places] for name, cells in table.cells.items()})

    return taken(np.flatnonzero(~test_N)), taken(np.flatnonzero(test_N))


def _testing(table: DataTable, split: str) -> Mask:
    words = [word.lower() for word in table.text(split)]
    strange = next((word for word in words if word not in _TRAINING | _TESTING), None)
    if strange is not None:
        raise ShardError(
            f"column {split!r} of {table.path} says {strange[:80]!r}; it must say of every sample one of "
            f"{', '.join(sorted(_TRAINING | _TESTING))}"
        )
    return np.array([word in _TESTING for word in words])
