"""CSV and its like, and Parquet: numbers as features, one column for the class, others set apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attune.fedclient.data.samples import samples_of
from attune.fedclient.data.table import is_table, read_table
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.readers.assemble import Raw


def recognises(path: Path) -> bool:
    return path.is_file() and is_table(path)


def read(path: Path, options: ReadOptions) -> Raw:
    """The class is the column --label names (default: `y` or `label`); columns that are named as the client or group,
    or by --apart, become label arrays, all others must be numbers. Empty cells, `?`, `NA` and `nan` are missing values.

    Errors: ShardError, SettingError for columns that are not there.
    """
    table = read_table(path)
    x, y, test_N, features = samples_of(table, options)
    more = {name: table.names_in(name) for name in dict.fromkeys(options.apart) if name != table.label_column(options.label)}
    name = path.name.partition(".")[0]
    if test_N is None:
        return Raw(name, (x, y), more=more, columns=features)
    more = {key: np.concatenate([each[~test_N], each[test_N]]) for key, each in more.items()}
    return Raw(name, (x[~test_N], y[~test_N]), (x[test_N], y[test_N]), more=more, columns=features)
