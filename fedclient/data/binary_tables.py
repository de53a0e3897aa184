"""Reading of tables in Excel files (.xlsx) and in Parquet.

Of an Excel file the first sheet is read by the rules for CSV files, with the values that formulas have. Cells of Parquet become
Python values; a column of pandas' index is known as one.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from attune.common.errors import SettingError, ShardError
from attune.fedclient.data.arrays import MAX_BINARY_BYTES, MAX_TEXT_BYTES, read_bytes
from attune.fedclient.data.cells import exact_below
from attune.fedclient.data.csv_file import (
    MAX_CELLS,
    TableContent,
    check_names,
    check_size,
    content_of_rows,
    is_index,
    plain_name,
)


def read_excel(path: Path) -> TableContent:
    """Read the first sheet of an Excel file.

    Raises:
        ShardError: The file cannot be read, is too large, or its sheet is not a table.
        SettingError: openpyxl is not installed.
    """
    try:
        from openpyxl import load_workbook
    except ImportError:
        raise SettingError(f"{path} is an Excel file, which openpyxl reads: pip install 'attune-fl[excel]'") from None
    data = read_bytes(path, MAX_TEXT_BYTES)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_TEXT_BYTES:
            raise ShardError(f"{path} holds more than {MAX_TEXT_BYTES >> 30} GiB, the limit; save it as Parquet")
        values, formulas = (load_workbook(io.BytesIO(data), read_only=True, data_only=only) for only in (True, False))
        names = values.sheetnames
        rows, written = (_rows(path, book.worksheets[0]) for book in (values, formulas))
        _check_whole(path, values.worksheets[0], rows)
    except ShardError:
        raise
    except Exception as error:  # the library has no class of its own for files that are damaged
        raise ShardError(f"{path} is no Excel file that can be read: {str(error)[:200] or type(error).__name__}") from None
    _check_computed(path, rows, written)
    content = content_of_rows(path, rows)
    if len(names) > 1:
        note = f"only the first sheet, {names[0]!r}, of {len(names)} is read"
        return TableContent(content.cells, content.index, (*content.notes, note))
    return content


def _rows(path: Path, sheet: Any) -> list[list[Any]]:
    """Return the cells of all rows, each as wide as the widest.

    Raises:
        ShardError: They are too many.
    """
    rows: list[list[Any]] = []
    cells = 0
    sheet.reset_dimensions()  # what a sheet declares as its area can be smaller than it is
    for row in sheet.iter_rows(values_only=True):
        rows.append(list(row))
        cells += len(row)
        if cells > MAX_CELLS:
            raise ShardError(f"{path} has more than {MAX_CELLS} cells, the limit; save it as Parquet")
    width = max(map(len, rows), default=0)
    return [row + [None] * (width - len(row)) for row in rows]


def _check_whole(path: Path, sheet: Any, rows: list[list[Any]]) -> None:
    """Check that as many cells with a value were read as the sheet's XML holds.

    Raises:
        ShardError: The library has left cells out, since rows or cells are numbered twice or not in order.
    """
    from openpyxl.xml.functions import iterparse

    held = 0
    with sheet._get_source() as source:
        for _, element in iterparse(source):
            tag = element.tag.rpartition("}")[2]
            if tag == "c":
                parts = {part.tag.rpartition("}")[2]: part for part in element}
                inline = element.get("t") == "inlineStr"
                held += ("is" in parts) if inline else bool("v" in parts and parts["v"].text)
            elif tag == "row":
                element.clear()
    read = sum(cell is not None for row in rows for cell in row)
    if read != held:
        raise ShardError(
            f"the first sheet of {path} holds {held} cells with values, and {read} could be read: rows or cells are numbered "
            "twice or not in order. Open it in a spreadsheet program and save it"
        )


def _check_computed(path: Path, values: list[list[Any]], formulas: list[list[Any]]) -> None:
    """Check that every formula has a value.

    Raises:
        ShardError: The program that wrote the file has not computed a formula, so its cell would count as missing.
    """
    for number, (row, written) in enumerate(zip(values, formulas, strict=False), 1):
        for value, formula in zip(row, written, strict=False):
            if value is None and formula is not None:
                raise ShardError(
                    f"row {number} of {path} has a formula without a value: open the file in a spreadsheet program and save it"
                )


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
