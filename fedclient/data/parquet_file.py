"""Reading of Parquet files. Cells become Python values; a column of pandas' index is known as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from attune.common.errors import SettingError, ShardError
from attune.fedclient.data.arrays import MAX_BINARY_BYTES
from attune.fedclient.data.cells import exact_below
from attune.fedclient.data.csv_file import TableContent, check_names, check_size, is_index, plain_name


def read_parquet(path: Path) -> TableContent:
    """Read a Parquet file.

    Raises:
        ShardError: The file cannot be read, or is too large.
        SettingError: pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise SettingError(f"{path} is Parquet, which pyarrow reads: pip install 'attune-fl[tables]'") from None
    try:
        if path.stat().st_size > MAX_BINARY_BYTES:
            raise ShardError(f"{path} holds more than {MAX_BINARY_BYTES >> 30} GiB, the limit; cut it into smaller files")
        with parquet.ParquetFile(path) as file:
            check_size(path, file.metadata.num_rows, file.metadata.num_columns)
            read = file.read()
            if read.num_rows != file.metadata.num_rows:
                raise ShardError(
                    f"{path} says that it holds {file.metadata.num_rows} rows, and {read.num_rows} could be read: it is damaged"
                )
    except (OSError, pyarrow.ArrowException) as error:
        raise ShardError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    names = [plain_name(name) for name in read.column_names]
    check_names(path, names)
    cells: dict[str, Any] = {name: cells_of(column) for name, column in zip(names, read.columns, strict=True)}
    index = index_columns(read.schema.metadata)
    return TableContent(cells, tuple(name for name in names if name in index or is_index(name, cells[name])))


def index_columns(metadata: dict[bytes, bytes] | None) -> set[str]:
    """Return the columns that hold the index of a pandas frame, by the file's metadata."""
    try:
        declared = msgspec.json.decode((metadata or {}).get(b"pandas", b"{}"))
        return {plain_name(name) for name in declared.get("index_columns", []) if isinstance(name, str)}
    except (msgspec.DecodeError, AttributeError, TypeError):
        return set()


def cells_of(column: Any) -> list[Any]:
    """Return the cells of a column of Arrow. Floats of 32 bits get the digits that they have as text, as in a CSV file.

    From the number on that their type cannot tell from its neighbour, they keep the type, so that none becomes a label.
    """
    cells: list[Any] = column.to_pylist()
    if str(column.type) not in ("float", "halffloat"):
        return cells
    narrow = np.float32 if str(column.type) == "float" else np.float16
    limit = exact_below(narrow)
    return [cell if cell is None else narrow(cell) if abs(cell) >= limit else float(str(narrow(cell))) for cell in cells]
