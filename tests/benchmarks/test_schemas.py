"""Tables of the benchmarks: schemas beside encodings by hand, what is kept beside ordinary models, and closed forms."""

import json
from pathlib import Path

import numpy as np

from attune.common.schema import Column, Schema
from attune.fedclient.read_options import ReadOptions
from attune.simulation.arguments import read_shards
from benchmarks.schemas import ComparedTables, arrays, lines, write_tables


def test_both_encodings_are_trained_and_tested_on_the_same_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = np.column_stack([np.arange(60), rng.integers(0, 3, 60)]).astype(float)  # the first column names the row
    x[7, 1] = np.nan
    schema = Schema.of({"row": Column("number"), "code": Column("category", values=["0", "1", "2"])})
    tables = ComparedTables(
        x, rng.integers(0, 2, 60), np.repeat([0, 1], 30), ["row", "code"], "classes", 1, schema, lambda x: x
    )
    paths = write_tables(tables, tmp_path)
    shards = read_shards(paths, ReadOptions.of("y", schema=schema))
    place = schema.feature_names.index("row")
    for name, (train_x, train_y, test_x, test_y) in arrays(tables, paths).items():
        shard = shards[name].load()
        assert train_x[:, 0].tolist() == shard.train_x[:, place].tolist()
        assert test_x[:, 0].tolist() == shard.test_x[:, place].tolist() != []
        assert train_y.tolist() == shard.train_y.tolist() and test_y.tolist() == shard.test_y.tolist()


def test_the_table_has_means_and_paired_intervals_by_hand(tmp_path: Path) -> None:
    """Differences 1, 2 and 3: mean 2, deviation 1, and Student's quantile for two degrees is 4.3027."""
    scores = {f"heart mlr {seed}": {"by_hand": 83.0, "by_schema": 84.0 + seed} for seed in range(3)}
    scores["heart dnn 0"] = {"by_hand": 83.0, "by_schema": 84.0}  # one run has no interval
    scores["wisdm mlr 0"] = {"by_schema": 84.0}  # half a run is none
    (tmp_path / "results.json").write_text(json.dumps(scores))
    assert list(lines(tmp_path / "results.json"))[2:] == [
        "| heart disease, 4 hospitals, accuracy | `mlr` | 3 | 85.0 | 83.0 | +2.0 (-0.5 to 4.5) |"
    ]
