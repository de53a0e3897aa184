"""Rows of a table that a device holds out: the same rows, whatever other rows come or go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.home import DeviceHome, ShardRecord
from attune.fedclient.read_options import ReadOptions

X, Y = np.random.default_rng(3).normal(size=(140, 2)).round(3), np.random.default_rng(4).integers(0, 2, 140)


def table(path: Path, rows: range | list[int], changed: tuple[int, ...] = ()) -> Path:
    lines = [f"{X[n][0]},{X[n][1] + (n in changed)},{Y[n]},p{n // 4},k{n}" for n in rows]
    path.write_text("\n".join(["a,b,y,patient,k", *lines]) + "\n")
    return path


def held(path: Path, **options: str) -> set[float]:
    """Return the first feature of every row that is held out."""
    chosen = ReadOptions.of(columns="a,b", **options)
    return set(LazyShard.on_disk(path, chosen).load().test_x[:, 0].tolist())


def test_a_row_more_leaves_all_others_where_they_were(tmp_path: Path) -> None:
    before = held(table(tmp_path / "t.csv", range(120)))
    assert 18 <= len(before) <= 42
    assert len(held(table(tmp_path / "t.csv", range(121))) ^ before) <= 1
    assert held(table(tmp_path / "t.csv", [*range(119, -1, -1)])) == before


def test_equal_rows_and_groups_fall_together(tmp_path: Path) -> None:
    twice = LazyShard.on_disk(table(tmp_path / "t.csv", [*range(60), *range(60)]), ReadOptions.of(columns="a,b")).load()
    assert not set(twice.train_x[:, 0].tolist()) & set(twice.test_x[:, 0].tolist())
    grouped = LazyShard.on_disk(table(tmp_path / "t.csv", range(120)), ReadOptions.of(columns="a,b", group="patient")).load()
    assert grouped.groups is not None and grouped.test_groups is not None
    assert not set(grouped.groups.tolist()) & set(grouped.test_groups.tolist())


def test_a_key_keeps_a_row_held_out_although_its_content_changes(tmp_path: Path) -> None:
    before = held(table(tmp_path / "t.csv", range(120)), key="k")
    assert held(table(tmp_path / "t.csv", range(120), changed=tuple(range(60))), key="k") == before


def test_a_csv_and_its_parquet_hold_out_the_same_rows(tmp_path: Path) -> None:
    read_csv, parquet = pytest.importorskip("pyarrow.csv").read_csv, pytest.importorskip("pyarrow.parquet")
    path = table(tmp_path / "t.csv", range(120))
    parquet.write_table(read_csv(path), tmp_path / "t.parquet")
    assert held(tmp_path / "t.parquet") == held(path)


def test_a_home_remembers_what_was_held_out_and_says_what_changed(tmp_path: Path) -> None:
    home = DeviceHome(tmp_path / "home")
    home.path.mkdir()
    first = LazyShard.on_disk(table(tmp_path / "t.csv", range(120)), ReadOptions.of(columns="a,b"))
    assert home.compare_shard(ShardRecord(120, first.digest, list(first.held_hashes))) == ""
    assert home.held_rows() == list(first.held_hashes) and first.held_hashes
    more = LazyShard.on_disk(table(tmp_path / "t.csv", range(10, 130)), ReadOptions.of(columns="a,b"), home.held_rows())
    said = home.compare_shard(ShardRecord(121, more.digest, list(more.held_hashes)))
    assert "120 samples then, 121 now" in said and "stay so" in said
    assert home.held_rows() == list(first.held_hashes)


@pytest.mark.parametrize("rows", [[0], [0] * 8, [0, 1], [0, 1, 2, 3]])
def test_few_rows_leave_something_to_train_on(tmp_path: Path, rows: list[int]) -> None:
    shard = LazyShard.on_disk(table(tmp_path / "t.csv", rows), ReadOptions.of(columns="a,b")).load()
    assert len(shard.train_x) >= 1 and len(shard.train_x) + len(shard.test_x) == len(rows)
