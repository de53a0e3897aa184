"""A site maps its names, values and decimal commas to those of its federation, and none of them leaves it."""

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

import attune
from attune.common.errors import SettingError, ShardError
from attune.fedclient.cli import main
from attune.fedclient.data.describe import describe
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.data.samples import table_of
from attune.fedclient.data.shard import load_shard
from attune.fedclient.data.table import read_table
from attune.fedclient.read_options import ReadOptions

MAP = ["Alter=age", "Geschlecht=sex", "sex:männlich=m,weiblich=f,unbekannt=", "krank=ill", "ill:ja=yes,nein=no"]


def german(path: Path) -> Path:
    sexes = ("männlich", "Weiblich", "unbekannt")
    rows = (f"{40 + n % 30},{sexes[n % 3]};{n % 7},5;{('nein', 'ja')[n % 2]}\n".replace(",", ";", 1) for n in range(90))
    path.write_text("Alter;Geschlecht;dose;krank\n" + "".join(rows))
    return path


def english(path: Path) -> Path:
    rows = (f"{40 + n % 30},{('m', 'f', '')[n % 3]},{n % 7}.5,{('no', 'yes')[n % 2]}\n" for n in range(90))
    path.write_text("age,sex,dose,ill\n" + "".join(rows))
    return path


def options(**more: object) -> ReadOptions:
    return ReadOptions.of("ill", schema="auto", map=MAP, decimal="comma", **more)  # type: ignore[arg-type]


def test_a_mapped_table_is_that_of_the_federation(tmp_path: Path) -> None:
    theirs, ours = german(tmp_path / "kiel.csv"), english(tmp_path / "lund.csv")
    mapped = LazyShard.on_disk(theirs, options())
    plain = LazyShard.on_disk(ours, ReadOptions.of("ill", schema="auto"))
    assert msgspec.json.encode(mapped.profile) == msgspec.json.encode(plain.profile)
    one, other = mapped.load(), plain.load()
    assert np.array_equal(np.sort(one.train_x, axis=0), np.sort(other.train_x, axis=0))
    for word in ("Alter", "Geschlecht", "weiblich", "krank", "nein"):
        assert word.encode() not in msgspec.json.encode(mapped.profile)


def test_all_commands_take_a_mapping(tmp_path: Path) -> None:
    theirs = german(tmp_path / "kiel.csv")
    words = [word for text in MAP for word in ("--map", text)] + ["--decimal", "comma"]

    def run(*arguments: object) -> str:
        done = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    assert "f, m" in run("describe", theirs, "--label", "ill", *words)
    apart = ("--apart", "sex", "--scheme", "iid", "--clients", "2", "--out", tmp_path / "cut")
    run("partition", "--dataset", theirs, "--label", "ill", *words, *apart)
    assert b'"age","dose"' in (tmp_path / "cut" / "shard0" / "meta.json").read_bytes()
    run("shard", theirs, "--label", "ill", "--schema", "auto", *words, "--out", tmp_path / "shard")
    table = {"schema": "auto", "map": MAP, "decimal": "comma"}
    attune.simulate({"kiel": theirs}, "fedavg", label="ill", rounds=1, table=table, home=tmp_path / "home", progress=False)
    device = ("--home", tmp_path / "home" / "devices" / "kiel")
    assert "accuracy" in run("evaluate", *device, "--data", theirs, "--label", "ill", *words)
    run("predict", *device, "--data", theirs, *words, "--out", tmp_path / "theirs.csv")
    run("export", *device, "--data", theirs, *words, "--out", tmp_path / "model.pt2")
    run("predict", *device, "--data", english(tmp_path / "lund.csv"), "--out", tmp_path / "ours.csv")
    assert (tmp_path / "theirs.csv").read_text() == (tmp_path / "ours.csv").read_text()


def test_the_sites_file_decides_the_mapping(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('map = ["Alter=age"]\ndecimal = "comma"\n')
    done = CliRunner().invoke(main, ["--data", "x", "--server", "h:1", "--site", str(site), "--map", "a=b"])
    assert done.exit_code == 2 and "decides map: leave --map out" in done.output
    site.write_text('map = "Alter=age"\n')
    done = CliRunner().invoke(main, ["--data", "x", "--server", "h:1", "--site", str(site)])
    assert done.exit_code == 2 and "map is a list of texts" in done.output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("Alters=age", r"no column 'Alters'.*'Alter'"),
        ("Alter=dose", "two columns of .* one name.*dose"),
        ("Alter=", "one name, or an empty one"),
        ("sexs:a=b", "no column 'sexs'"),
        ("krank:ja=yes,nein", "'nein' is no pair"),
        ("krank:ja=yes,JA=no", "'JA=no' is no pair THEIRS=OURS of its own"),
        ("krank", "^--map 'krank': it takes THEIRS=OURS"),
    ],
)
def test_a_wrong_mapping_is_refused(tmp_path: Path, given: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        table_of(german(tmp_path / "kiel.csv"), ReadOptions.of("krank", map=[given]))


def test_values_that_no_cell_has_are_said(tmp_path: Path) -> None:
    table = table_of(german(tmp_path / "kiel.csv"), ReadOptions.of("krank", map=["Geschlecht:mannlich=m,weiblich=f"]))
    assert "--map: no cell of Geschlecht is mannlich" in table.notes
    assert set(table.cells["Geschlecht"]) == {"männlich", "f", "unbekannt"}


@pytest.mark.parametrize(
    ("cell", "number"),
    [("0,5", "0.5"), ("-1.234,50", "-1234.50"), ("1.234", "1234"), ("12.345.678", "12345678"), ("3.14", "3.14"),
     ("31.12.2024", "31.12.2024"), ("A1,5", "A1,5"), ("7", "7")],
)  # fmt: skip
def test_decimal_commas(tmp_path: Path, cell: str, number: str) -> None:
    (tmp_path / "t.csv").write_text(f"a;b\n{cell};1\n{cell};2\n")
    assert table_of(tmp_path / "t.csv", ReadOptions.of("b", decimal="comma")).cells["a"] == [number, number]
    assert table_of(tmp_path / "t.csv", ReadOptions.of("b")).cells["a"] == [cell, cell]


def test_a_mapped_word_may_hold_an_equals_sign(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("dose,ill\n" + "".join(f"{'<=5' if n % 4 == 0 else n},{n % 2}\n" for n in range(20)))
    table = table_of(path, ReadOptions.of("ill", map=["dose:<=5=2.5"]))
    assert table.cells["dose"][0] == "2.5" and not table.notes


@pytest.mark.parametrize(
    ("task", "label", "cell", "number"),
    [
        ("survival", "months,died", "alive", "0"),
        ("multilabel", "died", "alive", "0"),
        ("regression", "died", "alive", "0.5"),
        ("classes", "died>0", "alive", "0"),
    ],
)
def test_the_error_of_an_outcome_in_words_names_a_mapping_that_works(
    tmp_path: Path, task: str, label: str, cell: str, number: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("v,months,died\n" + "".join(f"{n % 7}.5,{n % 30},{'alive' if n % 2 else 1}\n" for n in range(80)))
    options = ReadOptions.of(label, task=task, columns="v")
    with pytest.raises((ShardError, SettingError)) as error:
        load_shard(path, options=options)
    given = re.search("--map '(died:alive=NUMBER)'", str(error.value))
    assert given is not None, error.value
    assert str(error.value) in describe(read_table(path), options).warnings
    load_shard(path, options=replace(options, mappings=(given[1].replace("NUMBER", number),)))


def test_limits_with_a_decimal_comma_are_said_and_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    rows = (f"{'<0,6' if n % 5 == 0 else f'{n % 9},{n % 7}'};{n % 5};{n % 2}\n" for n in range(60))
    path.write_text("crp;dose;ill\n" + "".join(rows))
    assert any("say --decimal comma" in text for text in describe(read_table(path), ReadOptions.of("ill")).warnings)
    shard = load_shard(path, options=ReadOptions.of("ill", schema="auto", decimal="comma"))
    everything = {round(float(value), 3) for value in (*shard.train_x[:, 0], *shard.test_x[:, 0])}
    assert 0.6 in everything and max(everything) == 8.5
