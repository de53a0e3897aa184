"""Reader of tables (CSV, TSV, Parquet): numbers as features, one column for the class, others set apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from attune.fedclient.data.samples import samples_of, table_of
from attune.fedclient.data.table import is_table
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.readers.assemble import Raw


def recognises(path: Path) -> bool:
    """Return whether this reader can read the path, by names or a first line."""
    return path.is_file() and is_table(path)


def read(path: Path, options: ReadOptions) -> Raw:
    """Read a table.

    The column of --label has the classes (default: `y` or `label`). Columns that name the client or the group, and those of
    --apart, become label arrays; that of --key does not. All others must be
    numbers. What is a missing value: fedclient.data.cells.

    Raises:
        ShardError: The table cannot be read.
        SettingError: A column is not there.
    """
    table = table_of(path, options)
    options = options.for_columns(table.names)
    x, y, test_N, features, notes = samples_of(table, options)
    if options.key:
        table.check_complete([options.key], "the key")
    more = {name: table.names_in(name) for name in dict.fromkeys(options.apart) if name != table.label_column(options.label)}
    name = path.name.partition(".")[0]
    if test_N is None:
        return Raw(name, (x, y), more=more, columns=features, two_classes=options.threshold is not None, notes=notes)
    more = {key: np.concatenate([label_N[~test_N], label_N[test_N]]) for key, label_N in more.items()}
    return Raw(
        name,
        (x[~test_N], y[~test_N]),
        (x[test_N], y[test_N]),
        more=more,
        columns=features,
        two_classes=options.threshold is not None,
        notes=notes,
    )
