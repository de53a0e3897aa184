"""What lies at the path of --data, as arrays: a shard's folder, one .npz, or a site's own table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from attune.common.errors import SettingError, ShardError
from attune.common.task import TaskName
from attune.fedclient.data.arrays import Array, names_in, read_arrays
from attune.fedclient.data.meta import Meta, read_meta
from attune.fedclient.data.samples import samples_of
from attune.fedclient.data.table import DataTable, is_table, read_table
from attune.fedclient.read_options import PLAIN, ReadOptions

FOUR = ("train_x", "train_y", "test_x", "test_y")


@dataclass(frozen=True)
class DataSource:
    """(x, y) of the training part and perhaps of a test part, as they are in the files, and what is declared of them."""

    train: tuple[Array, Array]
    test: tuple[Array, Array] | None
    meta: Meta = Meta()  # noqa: RUF009 - it is immutable
    groups: Array | None = None  # (N,) of the training part
    test_groups: Array | None = None  # of the test part


def read_source(path: Path, options: ReadOptions = PLAIN) -> DataSource:
    """Errors: ShardError; SettingError for columns that are not there, and for options of tables where there is none."""
    if path.is_file() and is_table(path):
        return of_table(read_table(path), options)
    if replace(options, task=PLAIN.task) != PLAIN:
        raise SettingError(f"{path} is no table: leave --label and the other options of tables out")
    if not path.exists():
        raise ShardError(f"there is no shard at {path}; --data takes a folder with train.npz, one .npz file, or a table (.csv)")
    found = _of_folder(path) if path.is_dir() else _of_npz(path)
    return replace(found, meta=_for(found.meta, options.task, path))


def _for(meta: Meta, task: TaskName, path: Path) -> Meta:
    """With the task that was given, where meta.json says none. Errors: SettingError."""
    if task not in (PLAIN.task, meta.task) and meta.task != PLAIN.task:
        raise SettingError(f"meta.json of {path} says that the task is {meta.task}, and --task {task}; leave one of them out")
    return meta if task == PLAIN.task else msgspec.structs.replace(meta, task=task)


def declared(meta: Meta, table: DataTable, options: ReadOptions) -> Meta:
    """With the task, and with the names of the columns that y is made of where it is not classes. Errors: SettingError."""
    if options.task == "classes":
        return meta
    return msgspec.structs.replace(meta, task=options.task, classes=[table.label_column(name) for name in options.labels()])


def of_table(table: DataTable, options: ReadOptions) -> DataSource:
    """Errors: as `read_source`."""
    path = table.path
    x, y, test_N, names = samples_of(table, options)
    y = options.classes_of(y, str(path))
    groups = None
    if options.group:
        table.require(options.group)
        groups = table.names_in(options.group)
    training = np.ones(len(x), dtype=bool) if test_N is None else ~test_N
    train_x, test_x = x[training], x[~training]
    if options.missing == "median" and len(train_x):
        train_x, test_x = filled(train_x, test_x, str(path))
    elif np.isnan(x).any():
        raise ShardError(_gaps(path, x, names))
    test = None if test_N is None else (test_x, y[~training])
    meta = declared(Meta(kind="tabular", columns=names), table, options)
    apart = (None, None) if groups is None else (groups[training], groups[~training] if test else None)
    return DataSource((train_x, y[training]), test, meta, *apart)


def _gaps(path: Path, x: Array, names: list[str]) -> str:
    count_F = np.isnan(x).sum(axis=0)
    listed = ", ".join(f"{names[at]} ({int(count_F[at])})" for at in np.flatnonzero(count_F)[:8])
    return f"{path} lacks values in the columns (how many): {listed}; --missing median puts a column's median there"


def _of_folder(path: Path) -> DataSource:
    if not (path / "train.npz").is_file():
        raise ShardError(
            f"{path} holds no train.npz; a shard is a folder with train.npz (x, y), or one .npz file. Of a folder of images or "
            f"a Hugging Face dataset, fedclient shard {path} --out FOLDER makes a shard"
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
    """The array that meta.json names, one value for each sample x (N, ...) of this part. Errors: ShardError."""
    if meta.groups is None:
        return None
    groups = read_arrays(path, (meta.groups,))[0]
    if groups.shape != x.shape[:1]:
        raise ShardError(
            f"`groups` of {path} is {meta.groups!r} of shape {groups.shape}; it needs a value for each sample, {x.shape[:1]}"
        )
    return groups


def _of_npz(path: Path) -> DataSource:
    if not {"test_x", "test_y"} & set(names_in(path)):
        train_x, train_y = read_arrays(path, FOUR[:2])
        return DataSource((train_x, train_y), None)
    train_x, train_y, test_x, test_y = read_arrays(path, FOUR)
    return DataSource((train_x, train_y), (test_x, test_y))


def filled(train_x: Array, test_x: Array, name: str) -> tuple[Array, Array]:
    """NaN replaced by the median of its column over the training part. Errors: ShardError for a column of nothing else."""
    if train_x.dtype.kind != "f":
        return train_x, test_x
    if np.isnan(train_x).all(axis=0).any():
        raise ShardError(f"some column of {name} holds no value at all, so it has no median; leave it out")
    median = np.nanmedian(train_x, axis=0)
    return tuple(np.where(np.isnan(x), median, x).astype(x.dtype) for x in (train_x, test_x))  # type: ignore[return-value]
