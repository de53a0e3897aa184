"""Schemas in files: JSON, or TOML with sections [data.columns.NAME] as the operator edits it."""

from __future__ import annotations

from pathlib import Path

from attune.common.config import read_toml
from attune.common.durable import PUBLIC, read_small, write_file
from attune.common.errors import SettingError
from attune.common.schema import Column, Schema, columns_of_table, schema_of_json

MOST_BYTES = 16 << 20


def read_schema(path: Path) -> Schema:
    """Read a schema.

    Raises:
        SettingError: The file cannot be read, or holds no schema.
    """
    if path.suffix.lower() == ".toml":
        return Schema.of(read_columns(path))
    try:
        return schema_of_json(read_small(path, MOST_BYTES), str(path))
    except OSError as error:
        raise SettingError(f"cannot read the schema {path}: {error.strerror}") from None


def read_columns(path: Path) -> dict[str, Column]:
    """Read the columns that a TOML file describes.

    Raises:
        SettingError: The file cannot be read, or describes none.
    """
    data = read_toml(path).get("data")
    columns = data.get("columns") if isinstance(data, dict) else None
    if not isinstance(columns, dict) or not columns:
        raise SettingError(f"{path} has no section [data.columns.NAME]")
    return columns_of_table(columns, str(path))


def write_schema(path: Path, schema: Schema) -> None:
    """Write a schema: TOML if the file is called so, else JSON.

    Raises:
        DiskFull: The disk has no room.
    """
    text = schema.to_toml().encode() if path.suffix.lower() == ".toml" else schema.to_json() + b"\n"
    write_file(path, text, PUBLIC, durable=False)
