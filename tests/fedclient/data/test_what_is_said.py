"""Words of `fedclient shard` about the data: options that it refuses, all problems at once, and rows that are held out."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import attune
from attune.common.errors import AttuneError, NonFiniteFeatures, SettingError, ShardError
from attune.fedclient.cli import main
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.makers.make import make
from attune.fedclient.data.makers.make_options import LENGTH, MakeOptions
from attune.fedclient.data.shard import load_shard
from attune.fedclient.home import DeviceHome, ShardRecord
from attune.fedclient.model.scores import score_on_test_part
from attune.fedclient.read_options import ReadOptions

R = np.random.default_rng(0)


def table(path: Path, gaps: bool = True) -> Path:
    rows = [f"{'?' if gaps and n % 9 == 0 else round(R.normal(), 3)},{round(R.normal(), 3)},{n % 2}" for n in range(80)]
    path.write_text("\n".join(["v,w,ill", *rows]) + "\n")
    return path


def shard_command(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["shard", *map(str, arguments)])
    return done.exit_code, done.output


def test_one_line_says_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(",age,name,ill\n" + "".join(f"{n},{n / 2},p{n},{'yes' if n % 4 else 'no'}\n" for n in range(40)))
    code, said = shard_command(path, "--label", "ill", "--columns", "age", "--out", tmp_path / "out")
    assert code == 0 and "read 40 samples of the kind tabular, 1 (columns age); classes (how many): no (10), yes (30)" in said
    assert "left out: the column 'index'" in said and "--columns does not name them: name" in said


@pytest.mark.parametrize(
    ("given", "options", "refused"),
    [
        ("t.csv", ["--label", "ill", "--size", "3x3", "--grey", "--length", "5"], "--length, --size, --grey"),
        ("t.csv", ["--label", "ill", "--tokenizer", "nowhere"], "--tokenizer"),
        ("r.csv", ["--text", "said", "--label", "mood", "--columns", "x", "--missing", "median"], "--columns, --missing"),
        ("r.csv", ["--text", "said", "--label", "mood", "--group", "mood", "--size", "3x3"], "--group, --size"),
        ("photos", ["--label", "x", "--columns", "a", "--length", "3"], "--label, --columns, --length"),
        ("t.txt", ["--length", "5", "--size", "3x3"], "--size"),
    ],
)
def test_options_that_do_not_apply_are_refused(tmp_path: Path, given: str, options: list[str], refused: str) -> None:
    image = pytest.importorskip("PIL.Image")
    table(tmp_path / "t.csv")
    (tmp_path / "r.csv").write_text("said,mood\n" + "yes,good\nno,bad\n" * 20)
    (tmp_path / "t.txt").write_text("To be, or not to be, that is the question.\nWhether it is nobler\n" * 5)
    for n in range(4):
        (tmp_path / "photos" / str(n % 2)).mkdir(parents=True, exist_ok=True)
        image.new("RGB", (4, 4), (n, n, n)).save(tmp_path / "photos" / str(n % 2) / f"{n}.png")
    code, said = shard_command(tmp_path / given, *options, "--out", tmp_path / "out")
    assert code == 2 and refused in said and not (tmp_path / "out").exists()


def test_a_text_that_looks_like_a_table_is_not_cut_into_windows(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("age\tweight\till\n" + "".join(f"{n}\t{n % 9}\t{n % 2}\n" for n in range(80)))
    code, said = shard_command(path, "--out", tmp_path / "out")
    assert code == 6 and "looks like a table" in said and "--label" in said
    assert shard_command(path, "--label", "ill", "--out", tmp_path / "out")[0] == 0
    assert shard_command(path, "--length", "16", "--out", tmp_path / "windows")[0] == 0


def test_letters_that_nobody_knows_are_refused_or_said(tmp_path: Path) -> None:
    def made(words: list[str], name: str) -> tuple[str, ...]:
        path = tmp_path / f"{name}.csv"
        path.write_text("said,mood\n" + "".join(f"{word},{n % 2}\n" for n, word in enumerate(words * 10)), encoding="utf-8")
        options = MakeOptions(ReadOptions.of("mood"), text="said")
        return make(path, options, tmp_path / name).warnings

    with pytest.raises(SettingError, match=r"become question marks \(.*--tokenizer"):
        made(["плохо", "добро", "良い", "καλό"], "foreign")
    with pytest.raises(SettingError, match="question marks"):
        (tmp_path / "t.txt").write_text("Пример текста. " * 50, encoding="utf-8")
        make(tmp_path / "t.txt", MakeOptions(ReadOptions.of(), length=16), tmp_path / "windows")
    assert any("accents are left out" in note for note in made(["né à Paris en hiver", "a long and plain text"], "french"))
    assert not any("question marks" in note for note in made(["plain", "text"], "plain"))


def test_a_shard_of_a_table_with_gaps_keeps_them_until_a_device_cuts_it(tmp_path: Path) -> None:
    code, _ = shard_command(table(tmp_path / "t.csv"), "--label", "ill", "--missing", "median", "--out", tmp_path / "out")
    assert code == 0 and json.loads((tmp_path / "out" / "meta.json").read_text())["missing"] == "median"
    shard = load_shard(tmp_path / "out")
    with np.load(tmp_path / "out" / "train.npz") as kept:
        whole = kept["x"]
    known = whole[~np.isnan(whole[:, 0])]
    training = np.array([row for row in shard.train_x if any((row == other).all() for other in known)])
    assert shard.fill is not None and shard.fill[0] == pytest.approx(float(np.median(training[:, 0])))


def test_words_that_are_classes_stay_classes_in_the_shard(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("v,code\n" + "".join(f"{n / 2},{('NA', 'EU')[n % 2]}\n" for n in range(40)))
    assert shard_command(path, "--label", "code", "--out", tmp_path / "no")[0] == 6
    assert shard_command(path, "--label", "code", "--missing-words", "nothing", "--out", tmp_path / "out")[0] == 0
    assert load_shard(tmp_path / "out").labels == ["EU", "NA"]


def test_a_finished_model_fills_gaps_as_in_training(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name in ("a", "b"):
        table(tmp_path / f"{name}.csv")
    home = tmp_path / "home"
    options = {"missing": "median"}
    attune.simulate(str(tmp_path / "[ab].csv"), "fedavg", rounds=2, home=home, label="ill", table=options)
    device = home / "devices" / "a"
    model = DeviceHome(device).model
    fill = json.loads((model / "model.json").read_text())["standardiser"]["fill"]
    new = tmp_path / "new.csv"
    new.write_text(f"w,v\n2,?\n2,{fill[0]!r}\n")
    done = CliRunner().invoke(
        main, ["predict", "--data", str(new), "--out", str(tmp_path / "labels.csv"), "--home", str(device)]
    )
    assert done.exit_code == 0, done.output
    first, second = (line.split(",")[1] for line in (tmp_path / "labels.csv").read_text().splitlines()[1:])
    assert first == second
    score = score_on_test_part(DeviceHome(device), tmp_path / "a.csv", ReadOptions.of("ill"))
    assert score.samples == len(load_shard(tmp_path / "a.csv", options=ReadOptions.of("ill", missing="median"), held=()).test_x)
    exported = tmp_path / "model.pt2"
    done = CliRunner().invoke(main, ["export", "--out", str(exported), "--home", str(device)])
    assert done.exit_code == 0, done.output
    shares = torch.export.load(str(exported)).module()(torch.tensor([[float("nan"), 2.0], [fill[0], 2.0]]))
    assert torch.isfinite(shares).all() and torch.equal(shares[0], shares[1])


def test_a_model_without_fill_values_says_so(tmp_path: Path) -> None:
    for name in ("a", "b"):
        table(tmp_path / f"{name}.csv", gaps=False)
    attune.simulate(str(tmp_path / "[ab].csv"), "fedavg", rounds=1, home=tmp_path / "home", label="ill")
    with pytest.raises(NonFiniteFeatures, match="devices that train with --missing median"):
        score_on_test_part(DeviceHome(tmp_path / "home" / "devices" / "a"), table(tmp_path / "c.csv"), ReadOptions.of("ill"))


def test_a_column_without_any_value_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("v,w,ill\n" + "".join(f"?,{n},{n % 2}\n" for n in range(40)))
    with pytest.raises(ShardError, match="no value at all to train on in the columns 'v'"):
        load_shard(path, options=ReadOptions.of("ill", missing="median"))


def test_the_default_length_is_that_of_the_command() -> None:
    assert {option.name: option.default for option in main.commands["shard"].params}["length"] == LENGTH


def problems(path: Path, **options: str) -> str:
    with pytest.raises(AttuneError) as raised:
        load_shard(path, options=ReadOptions.of(**options))
    return str(raised.value)


def faulty_table(path: Path) -> Path:
    """Write a faulty_table with a column of text, one with a gap, a label that is missing, and a word that names no part."""
    rows = [f"{n % 5}.5,{n % 7},word{n},{n % 2},train" for n in range(40)]
    rows[3] = "1.5,,word,1,train"
    rows[4] = "1.5,2,word,,train"
    rows[5] = "1.5,2,word,1,perhaps"
    path.write_text("\n".join(["age,dose,town,ill,part", *rows]) + "\n")
    return path


def test_all_problems_of_a_table_are_named(tmp_path: Path) -> None:
    said = problems(faulty_table(tmp_path / "kiel.csv"), label="ill", split="part")
    for what in ("town", "'ill'", "perhaps"):
        assert what in said, said
    assert said.splitlines()[0] == "3 problems:"


def test_gaps_are_named_beside_a_missing_label(tmp_path: Path) -> None:
    text = faulty_table(tmp_path / "kiel.csv").read_text().replace("perhaps", "test").replace("word", "1")
    (tmp_path / "kiel.csv").write_text(text)
    said = problems(tmp_path / "kiel.csv", label="ill", split="part")
    assert "dose (1)" in said and "'ill'" in said, said


def test_one_problem_stays_as_it_is(tmp_path: Path) -> None:
    text = faulty_table(tmp_path / "kiel.csv").read_text().replace("perhaps", "test").replace(",word,,", ",word,1,")
    (tmp_path / "kiel.csv").write_text(text)
    said = problems(tmp_path / "kiel.csv", label="ill", split="part", apart=("town",))
    assert "problems:" not in said and "dose (1)" in said


X, Y = np.random.default_rng(3).normal(size=(140, 2)).round(3), np.random.default_rng(4).integers(0, 2, 140)


def people(path: Path, rows: range | list[int], changed: tuple[int, ...] = ()) -> Path:
    lines = [f"{X[n][0]},{X[n][1] + (n in changed)},{Y[n]},p{n // 4},k{n}" for n in rows]
    path.write_text("\n".join(["a,b,y,patient,k", *lines]) + "\n")
    return path


def held(path: Path, **options: str) -> set[float]:
    """Return the first feature of every row that is held out."""
    chosen = ReadOptions.of(columns="a,b", **options)
    return set(LazyShard.on_disk(path, chosen).load().test_x[:, 0].tolist())


def test_a_row_more_leaves_all_others_where_they_were(tmp_path: Path) -> None:
    before = held(people(tmp_path / "t.csv", range(120)))
    assert 18 <= len(before) <= 42
    assert len(held(people(tmp_path / "t.csv", range(121))) ^ before) <= 1
    assert held(people(tmp_path / "t.csv", [*range(119, -1, -1)])) == before


def test_equal_rows_and_groups_fall_together(tmp_path: Path) -> None:
    twice = LazyShard.on_disk(people(tmp_path / "t.csv", [*range(60), *range(60)]), ReadOptions.of(columns="a,b")).load()
    assert not set(twice.train_x[:, 0].tolist()) & set(twice.test_x[:, 0].tolist())
    grouped = LazyShard.on_disk(people(tmp_path / "t.csv", range(120)), ReadOptions.of(columns="a,b", group="patient")).load()
    assert grouped.groups is not None and grouped.test_groups is not None
    assert not set(grouped.groups.tolist()) & set(grouped.test_groups.tolist())


def test_a_key_keeps_a_row_held_out_although_its_content_changes(tmp_path: Path) -> None:
    before = held(people(tmp_path / "t.csv", range(120)), key="k")
    assert held(people(tmp_path / "t.csv", range(120), changed=tuple(range(60))), key="k") == before


def test_a_csv_and_its_parquet_hold_out_the_same_rows(tmp_path: Path) -> None:
    read_csv, parquet = pytest.importorskip("pyarrow.csv").read_csv, pytest.importorskip("pyarrow.parquet")
    path = people(tmp_path / "t.csv", range(120))
    parquet.write_table(read_csv(path), tmp_path / "t.parquet")
    assert held(tmp_path / "t.parquet") == held(path)


def test_a_home_remembers_what_was_held_out_and_says_what_changed(tmp_path: Path) -> None:
    home = DeviceHome(tmp_path / "home")
    home.path.mkdir()
    first = LazyShard.on_disk(people(tmp_path / "t.csv", range(120)), ReadOptions.of(columns="a,b"))
    assert home.compare_shard(ShardRecord(120, first.digest, list(first.held_hashes))) == ""
    assert home.held_rows() == list(first.held_hashes) and first.held_hashes
    more = LazyShard.on_disk(people(tmp_path / "t.csv", range(10, 130)), ReadOptions.of(columns="a,b"), home.held_rows())
    said = home.compare_shard(ShardRecord(121, more.digest, list(more.held_hashes)))
    assert "120 samples then, 121 now" in said and "stay so" in said
    assert home.held_rows() == list(first.held_hashes)


@pytest.mark.parametrize("rows", [[0], [0] * 8, [0, 1], [0, 1, 2, 3]])
def test_few_rows_leave_something_to_train_on(tmp_path: Path, rows: list[int]) -> None:
    shard = LazyShard.on_disk(people(tmp_path / "t.csv", rows), ReadOptions.of(columns="a,b")).load()
    assert len(shard.train_x) >= 1 and len(shard.train_x) + len(shard.test_x) == len(rows)
