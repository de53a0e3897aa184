"""A site's own files: tables as --data, and shards that `fedclient shard` makes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from attune.common.errors import SettingError, ShardError
from attune.fedclient.cli import main
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.makers.alphabets import CHARACTERS
from attune.fedclient.data.makers.make import make
from attune.fedclient.data.makers.make_options import LENGTH, MakeOptions
from attune.fedclient.data.shard import load_shard
from attune.fedclient.read_options import ReadOptions

IMAGES = pytest.importorskip("PIL.Image")


def csv(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def options(
    text: str = "", length: int = LENGTH, size: str = "", grey: bool = False, classes: str = "", **table: Any
) -> MakeOptions:
    return MakeOptions.of(ReadOptions.of(**table), text, length, size, grey, classes)


# --- tables


def test_a_table_is_a_shard(tmp_path: Path) -> None:
    path = csv(tmp_path / "kiel.csv", "age,ill,dose", *(f"{n},{'yes' if n % 2 else 'no'},{n / 2}" for n in range(40)))
    shard = load_shard(path, options=ReadOptions.of("ill"))
    assert (shard.name, shard.kind, shard.column_names) == ("kiel", "tabular", ("age", "dose"))
    assert shard.profile().labels == ["no", "yes"] and (len(shard.train_x), len(shard.test_x)) == (30, 10)
    assert np.array_equal(shard.train_x[:, 0], 2 * shard.train_x[:, 1])


def test_a_table_without_a_label_says_how(tmp_path: Path) -> None:
    path = csv(tmp_path / "kiel.csv", "age,ill", "1,0", "2,1")
    with pytest.raises(SettingError, match=r"say --label: which column of .* is the class \(age, ill\)"):
        load_shard(path)
    said = CliRunner().invoke(main, ["--data", str(path), "--server", "localhost:1"])
    assert said.exit_code == 2 and "say --label" in said.output


@pytest.mark.parametrize("head", ["split", "Split"])
def test_a_split_column_is_honoured(tmp_path: Path, head: str) -> None:
    rows = [f"{n},{n % 2},{['train', 'test', 'val'][n % 3]}" for n in range(30)]
    shard = load_shard(csv(tmp_path / "t.csv", f"a,y,{head}", *rows))
    assert sorted(shard.test_x[:, 0].tolist()) == [float(n) for n in range(30) if n % 3 == 1]
    assert len(shard.train_x) == 20 and shard.column_names == ("a",)


def test_a_split_column_of_another_name_and_words_that_nobody_knows(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", "a,y,part", *(f"{n},{n % 2},{'Test' if n > 5 else 'Train'}" for n in range(8)))
    assert len(load_shard(path, options=ReadOptions.of(split="part")).test_x) == 2
    odd = csv(tmp_path / "odd.csv", "a,y,part", "1,0,train", "2,1,later")
    with pytest.raises(ShardError, match="says 'later'"):
        load_shard(odd, options=ReadOptions.of(split="part"))
    with pytest.raises(SettingError, match="no column 'prt'"):
        load_shard(path, options=ReadOptions.of(split="prt"))


def test_a_column_called_split_that_is_a_number_is_a_feature(tmp_path: Path) -> None:
    shard = load_shard(csv(tmp_path / "t.csv", "a,y,split", *(f"{n},{n % 2},{n}" for n in range(8))))
    assert shard.column_names == ("a", "split")


def test_gaps_are_said_with_their_columns_or_filled(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", "a,b,y", "1,2,0", "?,4,1", "3,,0", "5,6,1")
    with pytest.raises(ShardError, match=r"a \(1\), b \(1\); --missing median"):
        load_shard(path)
    x = np.concatenate([(shard := load_shard(path, options=ReadOptions.of(missing="median"))).train_x, shard.test_x])
    assert sorted(x.tolist()) == [[1, 2], [3, 4], [3, 4], [5, 6]]


def test_groups_of_a_table_are_held_out_together(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", "a,y,who", *(f"{n},{n % 2},p{n // 4}" for n in range(40)))
    shard = load_shard(path, options=ReadOptions.of(group="who"))
    held = {int(a) // 4 for a in shard.test_x[:, 0]}
    assert len(shard.test_x) == 4 * len(held) and set(shard.groups.tolist()).isdisjoint({f"p{who}" for who in held})


def test_options_of_tables_for_what_is_none(write: Any, samples: Any) -> None:
    with pytest.raises(SettingError, match="is no table"):
        load_shard(write(*samples("tabular")), options=ReadOptions.of("y"))


def test_parquet_is_read_like_the_same_csv(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {
        "a": list(range(12)),
        "b": [n / 2 for n in range(12)],
        "ill": ["yes", "no"] * 6,
        "split": ["train"] * 9 + ["test"] * 3,
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    rows = zip(*columns.values(), strict=True)
    same = csv(tmp_path / "same.csv", ",".join(columns), *(",".join(map(str, row)) for row in rows))
    one, other = (load_shard(path, options=ReadOptions.of("ill")) for path in (tmp_path / "t.parquet", same))
    assert np.array_equal(one.train_x, other.train_x) and np.array_equal(one.test_y, other.test_y)
    assert one.column_names == other.column_names == ("a", "b")


def test_parquet_with_gaps_and_damaged_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"a": [1.0, None, 3.0], "y": [0, 1, 0]}), tmp_path / "t.parquet")
    with pytest.raises(ShardError, match=r"a \(1\)"):
        load_shard(tmp_path / "t.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ShardError, match=r"cannot read .*bad.parquet"):
        load_shard(tmp_path / "bad.parquet")


def test_the_shard_of_a_table_is_the_table(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", "a,b,y,who", *(f"{n},{-n},{n % 3},p{n // 5}" for n in range(40)))
    read = {"columns": "b,a", "group": "who"}
    out = tmp_path / "shard"
    said = CliRunner().invoke(
        main, ["shard", str(path), "--columns", "b,a", "--group", "who", "--classes", "0,1,2,3", "--out", str(out)]
    )
    assert said.exit_code == 0, said.output
    assert "tabular of shape 2, 4 classes, 30 samples to train and 10 to test" in said.output
    made, direct = load_shard(out), load_shard(path, options=ReadOptions.of(**read))
    assert made.column_names == ("b", "a") and made.profile().labels == [0, 1, 2, 3]
    assert np.array_equal(made.test_x, direct.test_x) and np.array_equal(made.groups, direct.groups)
    assert np.array_equal(made.test_groups, direct.test_groups) and set(made.test_groups) <= {f"p{n}" for n in range(8)}


def test_groups_of_a_split_table_go_with_their_samples(tmp_path: Path) -> None:
    rows = [f"{n},{n % 2},p{n // 4},{'test' if n >= 16 else 'train'}" for n in range(24)]
    path, out = csv(tmp_path / "t.csv", "a,y,who,split", *rows), tmp_path / "shard"
    shard = load_shard(path, options=ReadOptions.of(group="who"))
    assert shard.test_groups.tolist() == ["p4"] * 4 + ["p5"] * 4 and len(shard.groups) == 16
    done = CliRunner().invoke(main, ["shard", str(path), "--group", "who", "--out", str(out)])
    assert done.exit_code == 0 and np.array_equal(load_shard(out).test_groups, shard.test_groups)


def test_a_shard_is_not_written_over_something(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", "a,y", "1,0", "2,1")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ShardError, match="not empty"):
        make(path, options(), tmp_path / "out")


# --- images


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    IMAGES.new("RGB", size, colour).save(path)


def test_a_folder_of_images(tmp_path: Path) -> None:
    for n in range(4):
        picture(tmp_path / "in" / "train" / "cat" / f"{n}.png", (n, 0, 0))
        picture(tmp_path / "in" / "train" / "dog" / f"{n}.jpg", (0, 200, 0))
        picture(tmp_path / "in" / "test" / "cat" / f"{n}.png", (9, 0, 0))
    shard = make(tmp_path / "in", options(), tmp_path / "out")
    assert shard.profile().shape == (4, 6, 3) and shard.profile().labels == ["cat", "dog"]
    again = load_shard(tmp_path / "out")
    assert again.train_x[:4, 0, 0, 0].tolist() == [0, 1, 2, 3] and (len(again.train_x), len(again.test_x)) == (8, 4)
    assert make(tmp_path / "in", options(grey=True, size="2x3"), tmp_path / "small").profile().shape == (2, 3, 1)


def test_images_of_several_sizes_and_what_is_none(tmp_path: Path) -> None:
    picture(tmp_path / "in" / "cat" / "a.png", (1, 2, 3))
    picture(tmp_path / "in" / "cat" / "b.png", (1, 2, 3), (9, 9))
    with pytest.raises(ShardError, match="say --size"):
        make(tmp_path / "in", options(), tmp_path / "out")
    (tmp_path / "in" / "cat" / "b.png").write_bytes(b"no image")
    with pytest.raises(ShardError, match=r"b\.png is no image"):
        make(tmp_path / "in", options(), tmp_path / "out")
    (tmp_path / "none" / "deep").mkdir(parents=True)
    with pytest.raises(ShardError, match="no form that a shard"):
        make(tmp_path / "none", options(), tmp_path / "out")


def test_channels_first_images_are_recognised_and_said() -> None:
    x = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 6), dtype=np.uint8)
    given = shard_of("kiel", (x, np.arange(40) % 2))
    held = given.load()
    assert given.profile.shape == (8, 6, 3) and any("channels first" in warning for warning in given.warnings)
    rows = np.concatenate([held.train_x, held.test_x]).transpose(0, 3, 1, 2).reshape(40, -1)
    assert {row.tobytes() for row in rows} == {row.tobytes() for row in x.reshape(40, -1)}


@pytest.mark.parametrize("shape", [(40, 8, 6, 3), (40, 3, 8, 1), (40, 3, 8, 3)])
def test_where_the_last_axis_can_be_the_channels_it_is(shape: tuple[int, ...]) -> None:
    given = shard_of("kiel", (np.arange(np.prod(shape), dtype=np.uint8).reshape(shape), np.arange(40) % 2))
    assert given.profile.shape == shape[1:] and not any("channels" in warning for warning in given.warnings)


@pytest.mark.parametrize(("channels", "shape"), [("first", (8, 6, 3)), ("last", (3, 8, 6))])
def test_meta_json_says_which_axis_the_channels_are(write: Any, channels: str, shape: tuple[int, ...]) -> None:
    x = np.arange(40 * 3 * 8 * 6, dtype=np.uint8).reshape(40, 3, 8, 6)
    shard = load_shard(write(x, np.arange(40) % 2, test=(x[:4], [0, 1, 0, 1]), meta={"channels": channels}))
    assert shard.profile().shape == shape and shard.test_x.shape[1:] == shape
    assert not any("channels" in warning for warning in shard.warnings)


# --- text


def test_a_text_becomes_windows_with_the_next_character(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abcdefghijklmnopq")
    shard = make(tmp_path / "t.txt", options(length=4), tmp_path / "out")
    assert shard.per_position and shard.vocabulary == 100
    spoken = ["".join(CHARACTERS[token] for token in row) for row in (*shard.train_x, *shard.test_x)]
    follows = ["".join(CHARACTERS[token] for token in row) for row in (*shard.train_y, *shard.test_y)]
    assert (spoken, follows) == (["abcd", "efgh", "ijkl", "mnop"], ["bcde", "fghi", "jklm", "nopq"])


def test_a_column_of_text_has_a_class_each(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", "said,mood,split", "ja,good,train", "naturally,good,train", "no,bad,test")
    shard = make(path, options(text="said", length=4, label="mood"), tmp_path / "out")
    spoken = ["".join(CHARACTERS[token] for token in row) for row in (*shard.train_x, *shard.test_x)]
    assert spoken == ["  ja", "natu", "  no"] and shard.profile().labels == ["bad", "good"]


# --- Hugging Face


def saved(path: Path, columns: dict[str, list[Any]], features: dict[str, Any]) -> Path:
    """Write a dataset as `Dataset.save_to_disk` does: an Arrow stream, and two files of JSON."""
    pyarrow = pytest.importorskip("pyarrow")
    path.mkdir(parents=True)
    table = pyarrow.table(columns)
    with (
        pyarrow.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as out,
    ):
        out.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (path / "dataset_info.json").write_text(json.dumps({"features": features}))
    return path


def test_a_dataset_with_splits_and_named_classes(tmp_path: Path) -> None:
    named = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}, "text": {"dtype": "string", "_type": "Value"}}
    saved(tmp_path / "in" / "train", {"text": ["good", "bad"], "label": [1, 0]}, named)
    saved(tmp_path / "in" / "validation", {"text": ["fine"], "label": [1]}, named)
    (tmp_path / "in" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    shard = make(tmp_path / "in", options(text="text", length=4), tmp_path / "out")
    assert shard.train_y.tolist() == ["pos", "neg"] and shard.test_y.tolist() == ["pos"]


def test_a_dataset_of_images_and_one_of_numbers(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", (7, 0, 0))
    picture(tmp_path / "b.png", (8, 0, 0))
    images = [{"bytes": (tmp_path / name).read_bytes(), "path": None} for name in ("a.png", "b.png")] * 2
    shard = make(saved(tmp_path / "in", {"image": images, "label": [0, 1, 0, 1]}, {}), options(), tmp_path / "out")
    assert shard.profile().shape == (4, 6, 3) and shard.train_x[0, 0, 0].tolist() == [7, 0, 0]
    numbers = saved(tmp_path / "numbers", {"a": list(range(8)), "label": [0, 1] * 4}, {})
    assert make(numbers, options(), tmp_path / "out2").column_names == ("a",)


def test_a_dataset_of_numbers_has_the_rules_of_tables(tmp_path: Path) -> None:
    """The index of a sorted frame is no feature, and a split that lacks a column is named."""
    numbers = {"a": [3, 1, 2, 0] * 3, "__index_level_0__": list(range(12)), "label": [0, 1] * 6}
    saved(tmp_path / "in" / "train", numbers, {})
    saved(tmp_path / "in" / "test", {"a": [1, 2], "label": [0, 1]}, {})
    (tmp_path / "in" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert make(tmp_path / "in", options(), tmp_path / "out").column_names == ("a",)
    assert make(tmp_path / "in" / "train", options(), tmp_path / "out2").column_names == ("a",)
    saved(tmp_path / "more" / "train", numbers | {"b": [1.5] * 12}, {})
    (tmp_path / "in" / "test").rename(tmp_path / "more" / "test")
    (tmp_path / "in" / "dataset_dict.json").rename(tmp_path / "more" / "dataset_dict.json")
    with pytest.raises(SettingError, match=r"test has no column .b."):
        make(tmp_path / "more", options(missing="median"), tmp_path / "out3")


def with_splits(folder: Path, **labels: list[Any]) -> Path:
    for name, column in labels.items():
        saved(folder / name, {"a": list(range(len(column))), "label": column}, {})
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(labels)}))
    return folder


@pytest.mark.parametrize("unlabelled", [[-1, -1, -1], [None, None, None]])
def test_a_test_part_without_labels_gives_way_to_the_labelled_one(tmp_path: Path, unlabelled: list[Any]) -> None:
    path = with_splits(tmp_path / "in", train=[0, 1] * 20, validation=[1, 1, 0, 0], test=unlabelled)
    shard = make(path, options(), tmp_path / "out")
    assert shard.test_y.tolist() == [1, 1, 0, 0] and len(shard.train_y) == 40
    assert "left out: the split test of 3 samples, which has no labels" in " ".join(shard.warnings)
    only = with_splits(tmp_path / "only", train=[0, 1] * 20, test=unlabelled)
    shard = make(only, options(), tmp_path / "out2")
    assert len(shard.test_y) == 10 and "left out: the split test of 3 samples" in " ".join(shard.warnings)


def test_a_split_that_is_not_used_is_said(tmp_path: Path) -> None:
    path = with_splits(tmp_path / "in", train=[0, 1] * 20, validation=[1, 0], test=[0, 0, 1], extra=[1] * 5)
    shard = make(path, options(), tmp_path / "out")
    assert shard.test_y.tolist() == [0, 0, 1]
    said = " ".join(shard.warnings)
    assert "left out: the split validation of 2 samples" in said and "left out: the split extra of 5 samples" in said


def test_a_test_part_with_some_labels_missing_is_named(tmp_path: Path) -> None:
    path = with_splits(tmp_path / "in", train=[0, 1] * 20, test=[0, None, 1])
    with pytest.raises(ShardError, match=r"1 samples of .*/in/test have nothing in the column 'label'.*first in sample 2"):
        make(path, options(), tmp_path / "out")


def test_a_split_without_the_images_is_said_with_its_column(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", (7, 0, 0))
    image = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    saved(tmp_path / "in" / "train", {"image": [image] * 2, "label": [0, 1]}, {})
    saved(tmp_path / "in" / "test", {"picture": [image] * 2, "label": [0, 1]}, {})
    (tmp_path / "in" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(SettingError, match=r"test has no column .image. \(known: label, picture\)"):
        make(tmp_path / "in", options(), tmp_path / "out")


def test_predictions_for_a_table_take_its_columns_by_name(tmp_path: Path) -> None:
    import attune

    for name in ("kiel", "lund"):
        csv(tmp_path / f"{name}.csv", "a,b,y", *(f"{n},{n % 5},{int(n > 20)}" for n in range(40)))
    home = tmp_path / "home"
    attune.simulate(str(tmp_path / "*.csv"), "fedavg", rounds=2, home=home)
    new = csv(tmp_path / "new.csv", "remark,b,a", "x,1,2", "y,3,39")
    device = ["--home", str(home / "devices" / "kiel")]
    said = CliRunner().invoke(main, ["predict", "--data", str(new), "--out", str(tmp_path / "out.csv"), *device])
    assert said.exit_code == 0, said.output
    assert (tmp_path / "out.csv").read_text().splitlines()[1:] == ["0,0", "1,1"]
