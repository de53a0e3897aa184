"""What `fedserver export` or `Result.save` wrote, read again: the rows of metrics.csv, and summary.json."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import msgspec

from attune.common.errors import SettingError
from attune.common.json_text import from_json
from attune.fedserver.core.records import Row
from attune.fedserver.view.summary import Summary

NOT_ONE = "{} is not a folder that `fedserver export` or Result.save wrote: {}"


def read_summary(folder: Path) -> Summary:
    """Errors: SettingError for another folder."""
    try:
        return from_json((folder / "summary.json").read_bytes(), Summary)
    except (OSError, msgspec.DecodeError) as error:
        raise SettingError(NOT_ONE.format(folder, error)) from None


def read_rows(folder: Path) -> list[Row]:
    """In the order of time. Errors: SettingError for another folder."""
    try:
        with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = [row_of(line) for line in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, csv.Error) as error:
        raise SettingError(NOT_ONE.format(folder, error)) from None
    return sorted(rows, key=lambda row: (row.round, row.work != "train", row.client))


def row_of(line: Mapping[str, str]) -> Row:
    """A line of metrics.csv; an empty cell is a number that there is not."""
    return msgspec.convert({name: value for name, value in line.items() if value != ""}, Row, strict=False)
