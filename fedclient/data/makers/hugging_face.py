"""Reader of Hugging Face datasets as `save_to_disk` writes them, with pyarrow: columns with numbers, text or images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from attune.common.errors import SettingError, ShardError
from attune.common.text import from_json
from attune.fedclient.data.arrays import MAX_BINARY_BYTES
from attune.fedclient.data.cells import is_missing
from attune.fedclient.data.csv_file import is_index
from attune.fedclient.data.parquet_file import cells_of
from attune.fedclient.data.table import DataTable
from attune.fedclient.data.table_mapping import mapped
from attune.fedclient.read_options import PLAIN, ReadOptions

_TRAIN = ("train", "training")
_TEST = ("test", "testing", "validation", "valid", "val")


def recognises(path: Path) -> bool:
    """Return whether a Hugging Face dataset lies at `path`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def read(path: Path, options: ReadOptions = PLAIN) -> tuple[DataTable, DataTable | None]:
    """Return the training part and the test part, if there is one with labels. Numbers of named classes become the names.

    Splits that are not used are named in the notes of the training part.

    Raises:
        ShardError: The files cannot be read, or no split is for training.
        SettingError: pyarrow is not installed, or the training part has no label.
    """
    if not (path / "dataset_dict.json").is_file():
        return mapped(_table(path), options), None
    splits: list[str] = _json(path / "dataset_dict.json").get("splits", [])
    train = next((name for name in _TRAIN if name in splits), None)
    if train is None:
        raise ShardError(f"{path} has the splits {', '.join(splits)}, and none is called train; save one of them by itself")
    training, test, notes = mapped(_table(path / train), options), None, []
    for name in [*(name for name in _TEST if name in splits), *(name for name in splits if name not in (*_TEST, train))]:
        split = mapped(_table(path / name), options) if name in _TEST else _table(path / name)
        without = _has_no_labels(split, training, options)
        if name in _TEST and test is None and not without:
            test = split
            continue
        why = ", which has no labels" if without else " (save it as train or test to use it)"
        notes.append(f"left out: the split {name} of {len(split)} samples{why}")
    return replace(training, notes=(*training.notes, *notes)), test


def _has_no_labels(split: DataTable, training: DataTable, options: ReadOptions) -> bool:
    """Return whether the samples of a split have no label, or -1 where no training sample has it."""
    label = training.label_column(options.label_names[0])
    cells, known = split.cells.get(label, ()), set(map(str, training.cells[label]))
    return all(is_missing(cell) or (str(cell) == "-1" and "-1" not in known) for cell in cells)


def _table(path: Path) -> DataTable:
    try:
        import pyarrow
    except ImportError:
        raise SettingError(f"{path} is a Hugging Face dataset, which pyarrow reads: pip install 'attune-fl[tables]'") from None
    files = [path / Path(str(file["filename"])).name for file in _json(path / "state.json").get("_data_files", [])]
    try:
        if sum(file.stat().st_size for file in files) > MAX_BINARY_BYTES:
            raise ShardError(f"{path} holds more than {MAX_BINARY_BYTES >> 30} GiB, the limit; save a part of it")
        parts = []
        for file in files:
            with pyarrow.memory_map(str(file)) as source:
                parts.append(pyarrow.ipc.open_stream(source).read_all())
        table = pyarrow.concat_tables(parts)
    except (OSError, pyarrow.ArrowException, ValueError) as error:
        raise ShardError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    features: dict[str, Any] = _json(path / "dataset_info.json").get("features") or {}
    cells = {name: _named(cells_of(table.column(name)), features.get(name)) for name in table.column_names}
    return DataTable(path, cells, index=tuple(name for name in cells if is_index(name, cells[name])))


def _named(cells: list[Any], feature: Any) -> list[Any]:
    names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
    if not names:
        return cells
    return [None if cell is None or cell < 0 else names[cell] for cell in cells]


def _json(path: Path) -> dict[str, Any]:
    try:
        return from_json(path.read_bytes(), dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ShardError(f"cannot read {path}: {error}") from None
