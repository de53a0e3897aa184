"""Every form of data set: small files that are made here, and refusals."""

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attune.common.errors import NonFiniteFeatures, SettingError, ShardError
from attune.fedclient.data import arrays, csv_file
from attune.fedclient.data.makers.alphabets import CHARACTERS, encode
from attune.fedclient.data.shard import load_shard
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.datasets import load_dataset, load_source
from attune.simulation.partition.readers import plays
from attune.simulation.partition.readers.idx import parse
from attune.simulation.partition.samples import Corpus, Dataset, corpus
from attune.simulation.partition.split import partition, write_shards


def read(path: Path, **said: Any) -> Dataset:
    found = load_source(str(path), options=ReadOptions.of(**said))
    assert isinstance(found, Dataset)
    return found


def spoken(text: Corpus) -> dict[str, str]:
    return {
        role: "".join(CHARACTERS[token] for token in text.tokens[start:end])
        for role, start, end in zip(text.roles, text.starts[:-1], text.starts[1:], strict=True)
    }


# --- .npz ---


def test_npz_with_the_four_arrays_and_a_coarse_one(tmp_path: Path):
    x = np.arange(48, dtype=np.uint8).reshape(6, 2, 2, 2)
    np.savez(
        tmp_path / "own.npz", train_x=x[:4], train_y=[0, 1, 2, 3], test_x=x[4:], test_y=[1, 2],
        train_coarse=[0, 0, 1, 1], test_coarse=[0, 1], test_lossless=[True, False], train_note=[1, 2], test_note=[3],
    )  # fmt: skip
    data = read(tmp_path / "own.npz")
    assert (data.name, data.kind, data.classes, len(data)) == ("own", "images", [0, 1, 2, 3], 6)
    assert {name: array.tolist() for name, array in data.more.items()} == {"coarse": [0, 0, 1, 1, 0, 1]}
    other = read(tmp_path / "own.npz", label="coarse")
    assert other.y.tolist() == [0, 0, 1, 1, 0, 1] and other.more["y"].tolist() == [0, 1, 2, 3, 1, 2]


def test_npz_without_a_test_part_as_heart_disease(tmp_path: Path):
    x = np.array([[1, np.nan], [3, 5], [4, 7], [9, 6]], dtype=np.float32)
    names = np.array(["Bonn", "Köln"])
    np.savez(tmp_path / "h.npz", x=x, num=np.array([0, 3, 1, 0], np.uint8), hospital=[1, 0, 1, 0], hospital_names=names)
    with pytest.raises(SettingError, match="no array 'y' for the classes"):
        read(tmp_path / "h.npz")
    with pytest.raises(NonFiniteFeatures, match="--missing median"):
        read(tmp_path / "h.npz", label="num")
    data = read(tmp_path / "h.npz", label="num>0", missing="median")
    assert data.y.tolist() == [0, 1, 1, 0] and data.classes == [0, 1] and data.train_x[:, 1].tolist() == [6, 5, 7, 6]
    assert read(tmp_path / "h.npz", label="num > 1", missing="median").y.tolist() == [0, 1, 0, 0]
    parts = partition(data, "natural", by="hospital", split="time", test=0.5)
    assert parts.names == ("shard-bonn", "shard-k-ln") and [cut.tolist() for cut in parts.train] == [[1], [0]]


def test_a_test_part_is_held_out_where_a_scheme_needs_one(tmp_path: Path):
    np.savez(tmp_path / "one.npz", x=np.arange(40.0).reshape(20, 2), y=np.repeat([0, 1], [12, 8]), who=np.arange(20) % 3)
    parts = partition(read(tmp_path / "one.npz"), "iid", 1, seed=5)
    assert parts.counts("train").tolist() == [[9, 6]] and parts.counts("test").tolist() == [[3, 2]]
    rows = np.concatenate([parts.arrays(0, part)[0][:, 0] for part in ("train", "test")]) / 2
    assert sorted(rows.tolist()) == list(range(20)) and parts.dataset.more["who"].tolist() == (rows % 3).tolist()
    other = partition(read(tmp_path / "one.npz"), "iid", 1, seed=6)
    assert not np.array_equal(other.arrays(0, "test")[0], parts.arrays(0, "test")[0])


def test_npz_refusals(tmp_path: Path, monkeypatch):
    np.savez(tmp_path / "a.npz", train_x=np.zeros((2, 3)), train_y=[0, 1], test_x=np.zeros((1, 4)), test_y=[0])
    with pytest.raises(ShardError, match="must agree"):
        read(tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 3)), y=np.array([{}, {}], dtype=object))
    with pytest.raises(ShardError, match="holds Python objects"):
        read(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=np.zeros((2, 3)), y=[1.5, 2.0])
    with pytest.raises(ShardError, match="no integers"):
        read(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 3)), y=["a", "b"])
    with pytest.raises(SettingError, match="is text"):
        read(tmp_path / "d.npz", label="y>0")
    with pytest.raises(ShardError, match="cannot become 2x2"):
        read(tmp_path / "d.npz", shape="2x2")
    assert read(tmp_path / "d.npz", shape="3x1").train_x.shape == (2, 3, 1)
    np.savez(tmp_path / "e.npz", x=np.full((2, 1), np.nan), y=[0, 1])
    with pytest.raises(ShardError, match="no value at all"):
        read(tmp_path / "e.npz", missing="median")
    for said in ({"label": "a>b"}, {"shape": "0x3"}, {"shape": "3x"}, {"missing": "mean"}):
        with pytest.raises(SettingError):
            read(tmp_path / "d.npz", **said)
    monkeypatch.setattr("attune.simulation.partition.readers.npz.MAX_BINARY_BYTES", 2000)
    np.savez_compressed(tmp_path / "f.npz", x=np.zeros((100, 3)), y=np.zeros(100))
    with pytest.raises(ShardError, match="more than the limit"):
        read(tmp_path / "f.npz")


def test_a_shard_is_read_as_it_is(tmp_path):
    x, y = np.random.default_rng(3).normal(size=(12, 5)), np.arange(12) % 2
    np.savez(tmp_path / "train.npz", x=x, y=y)
    np.savez(tmp_path / "test.npz", x=x[:4], y=y[:4])
    (tmp_path / "meta.json").write_text('{"classes": [0, 1, 2]}')
    data = read(tmp_path)
    assert data.classes == [0, 1, 2] and len(data.test_y) == 4
    with pytest.raises(SettingError, match=r"meta\.json declares all that is needed"):
        read(tmp_path, label="z")


@pytest.mark.parametrize(("given", "empty"), [({"by": "site"}, ""), ({"by": "other", "group": "site"}, "NA")])
def test_a_sample_that_names_no_client_or_group_is_refused(tmp_path, given, empty):
    """All of them would be one client, or one group."""
    rows = [f"{n},{n % 2},{empty if n == 5 else n % 4},{n % 3}" for n in range(24)]
    (tmp_path / "t.csv").write_text("\n".join(["a,y,site,other", *rows]) + "\n")
    data = read(tmp_path / "t.csv", label="y", apart=("site", "other"))
    with pytest.raises(SettingError, match="1 samples of t have nothing in 'site'"):
        partition(data, "natural", **given)


def test_the_groups_of_a_shard_stay_together_when_it_is_cut_again(tmp_path):
    """A device would hold out windows for validation whose neighbours it trains on."""
    x, y, g = np.random.default_rng(3).normal(size=(96, 5)), np.arange(96) % 2, np.arange(96) // 6
    np.savez(tmp_path / "train.npz", x=x, y=y, patient=g)
    (tmp_path / "meta.json").write_text('{"groups": "patient"}')
    parts = partition(read(tmp_path), "iid", 2)
    for folder in write_shards(tmp_path / "out", parts):
        shard = load_shard(folder)
        assert shard.groups is not None and shard.test_groups is not None
        assert not set(shard.groups.tolist()) & set(shard.test_groups.tolist())
    with pytest.raises(SettingError, match=r"groups .* in both parts"):
        partition(read(tmp_path), "two-class-unequal", 2)


# --- idx ---


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def mnist(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for part, count in (("train", 6), ("t10k", 4)):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(rng.integers(0, 256, (count, 5, 4)).astype(np.uint8)))
        (tmp_path / f"{part}-labels.idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.arange(count, dtype=np.uint8))))
    return tmp_path


def test_idx_files_packed_or_not(mnist: Path):
    data, rng = read(mnist), np.random.default_rng(1)
    assert data.kind == "images" and data.train_x.shape == (6, 5, 4, 1) and data.train_x.dtype == np.uint8
    assert np.array_equal(data.train_x[..., 0], rng.integers(0, 256, (6, 5, 4)))
    assert np.array_equal(data.test_x[..., 0], rng.integers(0, 256, (4, 5, 4)))
    assert data.train_y.tolist() == list(range(6)) and data.test_y.tolist() == list(range(4))


def test_idx_numbers_are_big_endian(mnist: Path):
    values = np.array([[1, 300], [-2, 70_000], [5, 6], [0, 0]], dtype=">i4")
    (mnist / "t10k-images-idx3-ubyte").write_bytes(idx(values, 0x0C))
    assert parse(mnist / "t10k-images-idx3-ubyte").tolist() == values.tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no idx file"),
        (b"\0\0\x07\x01" + b"\0" * 8, "no idx file"),
        (b"\0\0\x08\x03\0\0", "ends within its sizes"),
        (idx(np.zeros((6, 5, 4), np.uint8))[:-1], "holds 135 bytes, but says 136"),
        (bytes([0, 0, 8, 4]) + b"\xff" * 16, "but says"),
    ],
)
def test_idx_refusals(mnist: Path, content: bytes, message: str):
    (mnist / "train-images-idx3-ubyte").write_bytes(content)
    with pytest.raises(ShardError, match=message):
        read(mnist)


def test_idx_files_that_are_missing_twice_or_damaged(mnist: Path):
    (mnist / "train-labels.idx1-ubyte.gz").write_bytes(b"\x1f\x8bnot gzip at all")
    with pytest.raises(ShardError, match="cannot read"):
        read(mnist)
    (mnist / "train-labels-idx1-ubyte").write_bytes(b"")
    with pytest.raises(ShardError, match="2 files"):
        read(mnist)
    (mnist / "t10k-images-idx3-ubyte").unlink()
    (mnist / "train-labels-idx1-ubyte").unlink()
    (mnist / "train-labels.idx1-ubyte.gz").unlink()
    with pytest.raises(ShardError, match="no file with train, labels"):
        read(mnist)


def test_a_packed_file_cannot_fill_the_memory(mnist: Path, monkeypatch):
    monkeypatch.setattr("attune.simulation.partition.readers.idx.MAX_BINARY_BYTES", 100)
    (mnist / "train-images-idx3-ubyte").unlink()
    (mnist / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(10**6)))
    with pytest.raises(ShardError, match="the limit"):
        read(mnist)


# --- CIFAR ---


def records(labels: list[list[int]]) -> tuple[bytes, np.ndarray]:
    rng = np.random.default_rng(len(labels))
    planes = rng.integers(0, 256, (len(labels), 3, 32, 32)).astype(np.uint8)
    return b"".join(bytes(label) + plane.tobytes() for label, plane in zip(labels, planes, strict=True)), planes


def test_cifar10_in_its_binary_version(tmp_path: Path):
    one, first = records([[3], [9], [0]])
    two, second = records([[1]])
    test, _ = records([[9], [3]])
    for name, content in (("data_batch_1", one), ("data_batch_2", two), ("test_batch", test)):
        (tmp_path / f"{name}.bin").write_bytes(content)
    data = read(tmp_path)
    assert data.train_y.tolist() == [3, 9, 0, 1] and data.test_y.tolist() == [9, 3] and data.train_x.shape == (4, 32, 32, 3)
    for image, planes in zip(data.train_x, [*first, *second], strict=True):
        assert image[5, 7].tolist() == [planes[colour, 5, 7] for colour in range(3)]
    (tmp_path / "data_batch_2.bin").write_bytes(two[:-1])
    with pytest.raises(ShardError, match="3072 bytes, which is no whole number of records of 3073"):
        read(tmp_path)


def test_cifar100_in_its_binary_version(tmp_path: Path):
    (tmp_path / "train.bin").write_bytes(records([[4, 99], [1, 7]])[0])
    (tmp_path / "test.bin").write_bytes(records([[4, 99]])[0])
    data = read(tmp_path)
    assert data.y.tolist() == [99, 7, 99] and data.more["coarse"].tolist() == [4, 1, 4]


@pytest.mark.parametrize("names", [("data_batch_1", "test_batch", "batches.meta"), ("train", "test", "meta")])
def test_the_pickled_cifar_is_refused_with_a_word_on_the_binary_one(tmp_path: Path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"\x80\x02}q\x01.")
    with pytest.raises(ShardError, match=r"pickled.*cifar-10-binary.tar.gz"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"), [("a.pkl", "never read"), ("b.tar.gz", "unpack it"), ("c.doc", "no form"), ("d.zip", "unpack")]
)
def test_what_has_no_form(tmp_path: Path, name, message):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ShardError, match=message):
        read(tmp_path / name)
    with pytest.raises(ShardError, match="no form"):
        read(tmp_path)


# --- LEAF ---


def leaf(users: dict[str, tuple[list, list]]) -> str:
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    return json.dumps({"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data})


def test_leaf_numbers_with_both_parts(tmp_path: Path):
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "train" / "a.json").write_text(leaf({"f1": ([[0, 1], [2, 3], [4, 5]], [7, 8, 7]), "f0": ([[6, 7]], [9])}))
    (tmp_path / "train" / "b.json").write_text(leaf({"f2": ([[1, 1]], [7])}))
    (tmp_path / "test" / "a.json").write_text(leaf({"f1": ([[8, 9]], [8]), "f0": ([[1, 0]], [9])}))
    data = read(tmp_path)
    assert data.kind == "tabular" and data.train_x.dtype == np.float32 and data.classes == [7, 8, 9]
    parts = partition(data, "natural")
    assert parts.names == ("shard-f0", "shard-f1") and "1 of 3 clients" in parts.notes[0]
    assert parts.arrays(1, "train")[0].tolist() == [[0, 1], [2, 3], [4, 5]] and parts.arrays(1, "test")[1].tolist() == [8]


def test_leaf_text_and_images(tmp_path: Path):
    (tmp_path / "all.json").write_text(leaf({"ROMEO": (["To be", "o be,"], [",", " "]), "JULIET": (["Ay me"], ["!"])}))
    data = read(tmp_path / "all.json")
    assert data.kind == "tokens" and data.vocabulary == 100 and data.classes == list(range(100))
    assert "".join(CHARACTERS[token] for token in data.train_x[1]) == "o be," and CHARACTERS[int(data.train_y[2])] == "!"
    (tmp_path / "flat.json").write_text(leaf({"w": ([[0.5] * 12, [1] * 12], [0, 1])}))
    assert read(tmp_path / "flat.json", shape="3x4x1").train_x.shape == (2, 3, 4, 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not LEAF's JSON"),
        pytest.param('{"users": ["a"], "user_data": {"a": {"x": ' + "[" * 100_000, "not LEAF's JSON", id="deep"),
        ('{"users": ["a"]}', "not LEAF's JSON"),
        (leaf({"a": ([[1, 2]], [0, 1])}), "not as many x as y"),
        (leaf({"a": ([[1, 2], [3]], [0, 1])}), "different lengths"),
        (leaf({"a": (["abc", "ab"], ["x", "y"])}), "different lengths"),
        (leaf({"a": ([1, 2], [0, 1])}), "neither lists of numbers nor text"),
        (leaf({"a": ([[1], [2]], [0, "b"])}), "some labels"),
        (leaf({"a": ([], [])}), "any samples"),
        (leaf({"a": ([[1]], [0]), "b": ([[2]], [1])}).replace('["a", "b"]', '["a"]'), "2 users have data, and 1 are listed"),
        (leaf({"a": ([[1]], [0])}).replace("[1], ", "[3], ", 1), "user 'a' .* says that it has 3 samples, and 1 could be read"),
    ],
)
def test_leaf_refusals(tmp_path: Path, content: str, message: str):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ShardError, match=message):
        read(tmp_path)


# --- CSV ---


def test_csv_with_a_column_that_names_the_client(tmp_path: Path):
    rows = ["age;site;kind;note;pressure", "50;10;ill;x;1.5", "60;9;well;y;?", "70;9;ill;z;3.5", "40;10;well;;2.5"]
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    with pytest.raises(ShardError, match=r"column 'note' \('x' in sample 1\).*--apart note"):
        read(tmp_path / "t.csv", label="kind", apart=["site"])
    data = read(tmp_path / "t.csv", label="kind", apart=["site", "note"], missing="median")
    assert data.train_x.tolist() == [[50, 1.5], [60, 2.5], [70, 3.5], [40, 2.5]] and data.classes == ["ill", "well"]
    parts = partition(data, "natural", by="site", split="time", test=0.5)
    assert parts.names == ("shard-site9", "shard-site10") and [cut.tolist() for cut in parts.test] == [[2], [3]]


def test_csv_with_numbers_as_classes(tmp_path: Path):
    (tmp_path / "t.tsv.gz").write_bytes(gzip.compress(b"a\tlabel\n1\t0\n2\t4\n3\t2\n"))
    assert read(tmp_path / "t.tsv.gz").classes == [0, 2, 4]
    assert read(tmp_path / "t.tsv.gz", label="label>1").y.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("content", "said", "error", "message"),
    [
        ("a,b\n1,2\n", {}, SettingError, "say --label"),
        ("a,b\n1,2\n", {"label": "c"}, SettingError, "no column 'c'"),
        ("a,y\n1,2\n3\n", {}, ShardError, "sample 2 of .* has 1 cells"),
        ("a,a\n1,2\n", {}, ShardError, "each differently"),
        ("", {}, ShardError, "name every column"),
        ("a,y\n", {}, ShardError, "no samples"),
        ("a,y\n1,\n", {}, ShardError, "1 samples of .* have nothing in the column 'y'"),
        ("a,y\n1,2\n", {"apart": ["a"]}, ShardError, "no column left"),
        ('a,y\n"1,2\n' + "x" * 200_000, {}, ShardError, "not a table"),
    ],
)
def test_csv_refusals(tmp_path: Path, content, said, error, message):
    (tmp_path / "t.csv").write_text(content)
    with pytest.raises(error, match=message):
        read(tmp_path / "t.csv", **said)


def test_text_is_limited(tmp_path: Path, monkeypatch):
    (tmp_path / "t.csv").write_text("a,y\n" + "1,2\n" * 50)
    monkeypatch.setattr(csv_file, "MAX_CELLS", 20)
    with pytest.raises(ShardError, match="more than 20 cells"):
        read(tmp_path / "t.csv")
    monkeypatch.setattr(arrays, "MAX_TEXT_BYTES", 100)
    with pytest.raises(ShardError, match="the limit"):
        read(tmp_path / "t.csv")
    monkeypatch.setattr(plays, "MAX_TEXT_BYTES", 30)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("ROMEO:\nAh me! Ah me!\n")
    with pytest.raises(ShardError, match="the limit"):
        load_source(str(tmp_path))
    monkeypatch.setattr(arrays, "MAX_FILES", 2)
    with pytest.raises(ShardError, match="3 files"):
        load_source(str(tmp_path))


# --- text with roles ---

PLAY = """\tTHE PLAY

PERSONS
GHOST\ta ghost.

ACT I
SCENE I\tA wood.

\t[Enter both]

HAMLET\tWho  is [Aside] there?
\tSpeak!

GHOST\tI, who was
\tking.
\t[Exit
\tGHOST]

HAMLET:\tGone.
"""
SCRIPT = "First Citizen:\nBefore we proceed:\nhear me.\n\nAll:\nSpeak.\n\nFirst Citizen:\nYou are."


def test_plays(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text(PLAY)
    found = load_source(str(tmp_path))
    assert isinstance(found, Corpus)
    assert spoken(found) == {
        f"{play} {role}": text
        for play in ("one", "two")
        for role, text in (("HAMLET", "Who is there?\nSpeak!\nGone."), ("GHOST", "I, who was\nking."))
    }


def test_scripts_and_tables_of_lines(tmp_path: Path):
    (tmp_path / "s.txt").write_text(SCRIPT)
    found = load_source(str(tmp_path / "s.txt"))
    assert isinstance(found, Corpus)
    assert spoken(found) == {"First Citizen": "Before we proceed:\nhear me.\nYou are.", "All": "Speak."}
    lines = "role_id\tplay\trole\tline\n0\tone\tA\tHello.\n1\ttwo\tA\tNo.\n0\tone\tA\tBye.\n"
    (tmp_path / "roles.tsv.gz").write_bytes(gzip.compress(lines.encode()))
    table_of_lines = load_source(str(tmp_path / "roles.tsv.gz"))
    assert isinstance(table_of_lines, Corpus)
    assert spoken(table_of_lines) == {"one A": "Hello.\nBye.", "two A": "No."}
    with pytest.raises(SettingError, match="--scheme roles"):
        load_dataset(str(tmp_path / "s.txt"))
    (tmp_path / "roles.tsv").write_text("role\tline\nA\n")
    with pytest.raises(ShardError, match=r"line 2 of .* has 1 cells"):
        load_source(str(tmp_path / "roles.tsv"))
    (tmp_path / "n.txt").write_text("Nobody speaks here.\nNobody.")
    with pytest.raises(ShardError, match="no roles in"):
        load_source(str(tmp_path / "n.txt"))


def test_the_vocabulary():
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 100
    assert "".join(CHARACTERS[token] for token in encode("Señor\t„a“ 日")) == "Senor\t?a? ?"
    assert encode("").shape == (0,) and corpus("none", []).starts.tolist() == [0]
