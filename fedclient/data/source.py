"""Reading of the path of --data into arrays: a shard's folder, an .npz file, or a site's own table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from attune.common.classes import label_of_text
from attune.common.errors import SettingError, ShardError
from attune.common.schema import Schema
from attune.common.task import TaskName
from attune.fedclient.data.arrays import Array, names_in, read_arrays
from attune.fedclient.data.describe import describe
from attune.fedclient.data.meta import Meta, Standardise, read_meta
from attune.fedclient.data.samples import samples_of, table_of
from attune.fedclient.data.table import DataTable, may_be_table
from attune.fedclient.read_options import PLAIN, ReadOptions

_ARRAYS = ("train_x", "train_y", "test_x", "test_y")


@dataclass(frozen=True)
class DataSource:
    """Arrays as they are in the files, and what is declared of them.

    Attributes:
        train: x and y of the training part.
        test: x and y of the test part, if there is one.
        meta: Content of meta.json, or what follows from a table.
        groups: Group of each training sample, (N,).
        test_groups: Group of each test sample.
        notes: What the user should know about the reading.
        keys: Keys that tell the rows of a table apart, (N,).
        table: Whether it is a table of which the device holds rows out itself.
    """

    train: tuple[Array, Array]
    test: tuple[Array, Array] | None
    meta: Meta = Meta()  # noqa: RUF009 - it is immutable
    groups: Array | None = None
    test_groups: Array | None = None
    notes: tuple[str, ...] = ()
    keys: Array | None = None
    table: bool = False


def read_source(path: Path, options: ReadOptions = PLAIN) -> DataSource:
    """Read the arrays at a path, with the task of the options.

    Raises:
        ShardError: The files cannot be read, or do not fit together.
        SettingError: A column does not exist, options of tables are given for other files, or meta.json has another task.
    """
    _check_regular(path)
    if path.is_file() and may_be_table(path):
        return source_of_table(table_of(path, options), options)
    if options.of_tables != PLAIN:
        raise SettingError(f"{path} is no table: leave --label and the other options of tables out")
    if not path.exists():
        raise ShardError(f"there is no shard at {path}; --data takes a folder with train.npz, one .npz file, or a table (.csv)")
    source = _read_folder(path) if path.is_dir() else _read_npz(path)
    return replace(source, meta=with_values(_with_task(source.meta, options.task, path), options))


def _check_regular(path: Path) -> None:
    """Check that no file of a shard is a pipe or a device, whose reader would wait.

    Raises:
        ShardError: One is.
    """
    for file in (path, *(path.iterdir() if path.is_dir() else ())):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ShardError(f"cannot read {file}: it is no regular file")


def with_values(meta: Meta, options: ReadOptions) -> Meta:
    """Return `meta` with what the options say about missing values and scales."""
    if options.missing_words:
        meta = msgspec.structs.replace(meta, missing_words=list(options.missing_words))
    if options.standardise:
        scaled: Standardise = "federation" if options.standardise == "federation" else options.standardise == "device"
        meta = msgspec.structs.replace(meta, standardise=scaled)
    return msgspec.structs.replace(meta, missing="median") if options.missing == "median" else meta


def _with_task(meta: Meta, task: TaskName, path: Path) -> Meta:
    """Return `meta` with the task of the options, unless it is the default.

    Raises:
        SettingError: meta.json has another task.
    """
    if task not in (PLAIN.task, meta.task) and meta.task != PLAIN.task:
        raise SettingError(f"meta.json of {path} says that the task is {meta.task}, and --task {task}; leave one of them out")
    return meta if task == PLAIN.task else msgspec.structs.replace(meta, task=task)


def with_outputs(meta: Meta, table: DataTable, options: ReadOptions) -> Meta:
    """Return `meta` with the task of the options and, unless y holds classes, the names of its columns.

    Raises:
        SettingError: A column does not exist.
    """
    if options.task == "classes":
        return meta
    return msgspec.structs.replace(meta, task=options.task, classes=[table.label_column(name) for name in options.labels()])


def source_of_table(table: DataTable, options: ReadOptions) -> DataSource:
    """Return the arrays of a table.

    Raises:
        ShardError: A cell cannot be used, or values are missing and the options do not fill them in.
        SettingError: A column does not exist.
    """
    options = options.for_columns(table.names)
    proposal = describe(table, options) if options.proposes else None
    schema = options.schema if proposal is None else proposal.schema
    if schema is not None:
        options = options.with_schema(schema, table.names)
    x, y, test_N, names, notes = samples_of(table, options)
    notes = notes if proposal is None else (*proposal.warnings, *notes)
    groups = table.labels(options.group, "the group") if options.group else None
    keys = table.labels(options.key, "the key") if options.key else None
    training = np.ones(len(x), dtype=bool) if test_N is None else ~test_N
    test = None if test_N is None else (x[~training], y[~training])
    meta = with_outputs(with_values(Meta(kind="tabular", columns=names), options), table, options)
    if options.schema is not None:
        meta = _with_schema(meta, options.schema)
    groups_of_parts = (None, None) if groups is None else (groups[training], groups[~training] if test else None)
    groups_of_training, groups_of_test = groups_of_parts
    return DataSource((x[training], y[training]), test, meta, groups_of_training, groups_of_test, notes, keys, test is None)


def _with_schema(meta: Meta, schema: Schema) -> Meta:
    """Return `meta` with the schema, and the classes that it lists of its label."""
    labels = schema.with_kind("label")
    values = schema.columns[labels[0]].values if len(labels) == 1 else []
    classes = [label_of_text(value) for value in values] if meta.task == "classes" and values else meta.classes
    return msgspec.structs.replace(meta, missing="median", schema=schema, classes=classes)


def _read_folder(path: Path) -> DataSource:
    if not (path / "train.npz").is_file():
        raise ShardError(
            f"{path} holds no train.npz; a shard is a folder with train.npz (x, y), or one .npz file. To make a shard from "
            f"images or a Hugging Face dataset, use fedclient shard {path} --out FOLDER"
        )
    meta = read_meta(path / "meta.json")
    train_x, train_y = read_arrays(path / "train.npz", ("x", "y"))
    groups = _groups(path / "train.npz", meta, train_x)
    if not (path / "test.npz").exists():
        return DataSource((train_x, train_y), None, meta, groups)
    test_x, test_y = read_arrays(path / "test.npz", ("x", "y"))
    named = meta.groups in names_in(path / "test.npz")
    return DataSource(
        (train_x, train_y), (test_x, test_y), meta, groups, _groups(path / "test.npz", meta, test_x) if named else None
    )


def _groups(path: Path, meta: Meta, x: Array) -> Array | None:
    """Return the group of each sample of this part, (N,), if meta.json names an array with groups.

    Raises:
        ShardError: The array does not exist, or has not one value for each sample.
    """
    if meta.groups is None:
        return None
    groups = read_arrays(path, (meta.groups,))[0]
    if groups.shape != x.shape[:1]:
        raise ShardError(
            f"`groups` of {path} is {meta.groups!r} of shape {groups.shape}; it needs a value for each sample, {x.shape[:1]}"
        )
    return groups


def _read_npz(path: Path) -> DataSource:
    if not {"test_x", "test_y"} & set(names_in(path)):
        train_x, train_y = read_arrays(path, _ARRAYS[:2])
        return DataSource((train_x, train_y), None)
    train_x, train_y, test_x, test_y = read_arrays(path, _ARRAYS)
    return DataSource((train_x, train_y), (test_x, test_y))
