"""One definition of a cell: integers, codes, missing values and booleans are the same in CSV, Parquet and arrays."""

from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attune.common.classes import label_of_text, look
from attune.common.errors import NonFiniteFeatures, SettingError, ShardError
from attune.fedclient.data.cells import is_missing, label_of, words_of
from attune.fedclient.data.lazy_shard import shard_of
from attune.fedclient.data.shard import Shard, load_shard
from attune.fedclient.read_options import ReadOptions
from tests.needs import Later, needs

pytestmark = needs("pyarrow")
PARQUET, PYARROW = Later("pyarrow.parquet"), Later("pyarrow")


def csv(path: Path, *lines: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(("\n".join(lines) + "\n").encode(encoding))
    return path


def parquet(path: Path, metadata: dict[bytes, bytes] | None = None, **columns: Any) -> Path:
    PARQUET.write_table(PYARROW.table(columns).replace_schema_metadata(metadata), path)
    return path


def codes(path: Path, values: list[str], **options: Any) -> Shard:
    """Return the shard of a table with these labels, each in several rows."""
    rows = [f"{n % 7},{n * 0.5},{values[n % len(values)]}" for n in range(40)]
    return load_shard(csv(path, "v,w,code", *rows), options=ReadOptions.of("code", **options))


# --- codes and numbers


@pytest.mark.parametrize(
    ("text", "label"),
    [
        *(
            ("7", 7),
            ("-7", -7),
            ("7.0", 7),
            ("0", 0),
            ("9223372036854775807", 2**63 - 1),
            ("123456789012345678", 123456789012345678),
        ),
        *(("9223372036854775808", "9223372036854775808"), ("0117", "0117"), ("1_2", "1_2"), ("1E30", "1E30"), ("+1", "+1")),
        *(("1.5", "1.5"), ("TRUE", "true"), ("False", "false"), ("e\u0301", "é"), (" a ", "a"), ("١", "١"), ("00", "00")),
    ],
)
def test_what_is_an_integer(text: str, label: int | str) -> None:
    assert label_of_text(text) == label


@pytest.mark.parametrize(
    ("cell", "label"),
    [
        *((True, "true"), (np.bool_(False), "false"), (b"ill", "ill"), (Decimal("1.00"), 1), (Decimal("1.50"), "1.50")),
        *(
            (1.0, 1),
            (1.5, "1.5"),
            (np.int64(3), 3),
            (date(2024, 5, 1), "2024-05-01"),
            (datetime(2024, 5, 1), "2024-05-01"),
            (123456789012345678, 123456789012345678),
        ),
    ],
)
def test_what_a_cell_of_parquet_is(cell: Any, label: int | str) -> None:
    assert label_of(cell) == label


@pytest.mark.parametrize("cell", [1e17, b"\xff", [1, 2]])
def test_what_can_be_no_label(cell: Any) -> None:
    with pytest.raises(ValueError, match=r"digits|binary|several"):
        label_of(cell)


@pytest.mark.parametrize("values", [["0117", "117"], ["1_2", "12"], ["1E30", "1E31"], ["01", "02"], ["1E1", "10"]])
def test_codes_keep_their_text(tmp_path: Path, values: list[str]) -> None:
    assert codes(tmp_path / "t.csv", values).labels == sorted(values)


def test_long_codes_keep_every_digit(tmp_path: Path) -> None:
    values = [900000000000000001, 900000000000000002]
    assert codes(tmp_path / "t.csv", list(map(str, values))).labels == values
    path = parquet(tmp_path / "t.parquet", v=np.arange(40.0), y=[values[n % 2] for n in range(40)])
    assert load_shard(path).labels == values


def test_long_codes_that_are_floats_already_are_refused(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", v=np.arange(40.0), y=[9e17, None] * 20)
    with pytest.raises(ShardError, match="nothing in the column"):
        load_shard(path)
    with pytest.raises(ShardError, match="last digits are lost"):
        load_shard(parquet(path, v=np.arange(40.0), y=[9e17, 8e17] * 20))


@pytest.mark.parametrize(("width", "code"), [(16, 2049), (32, 16_777_217), (32, 123_456_789)])
def test_codes_in_narrow_floats_are_refused_where_digits_are_lost(tmp_path: Path, width: int, code: int) -> None:
    """Half of them would be one class with their neighbour: 16,777,217 is 16,777,216 in 32 bits."""
    y = np.array([code, 1] * 20).astype(f"float{width}")
    with pytest.raises(ShardError, match="last digits are lost"):
        shard_of("kiel", (np.arange(80.0).reshape(40, 2), y))
    with pytest.raises(ShardError, match="last digits are lost"):
        load_shard(parquet(tmp_path / "t.parquet", v=np.arange(40.0), y=y))
    y[y > 1] = 1000
    assert load_shard(parquet(tmp_path / "t.parquet", v=np.arange(40.0), y=y)).labels == [1, 1000]


def test_groups_that_are_no_integers_stay_apart(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", v=np.arange(40.0), y=[0, 1] * 20, g=[1 + n % 10 / 10 for n in range(40)])
    shard = load_shard(path, options=ReadOptions.of("y", group="g"))
    assert shard.groups is not None and shard.test_groups is not None
    assert len({*shard.groups.tolist(), *shard.test_groups.tolist()}) == 10


@pytest.mark.parametrize("cell", ["1_2", "٣", "0x1F", "1e", "12abc"])
def test_a_feature_is_a_number_only_if_it_is_written_as_one(tmp_path: Path, cell: str) -> None:
    with pytest.raises(ShardError, match=f"'a' \\('{cell}' in sample 2\\)"):
        load_shard(csv(tmp_path / "t.csv", "a,y", "1,0", f"{cell},1"))


def test_all_columns_that_are_no_numbers_are_named_with_what_to_do(tmp_path: Path) -> None:
    rows = [f"Anna,{n},2024-01-0{n},x{n},{n % 2}" for n in range(1, 6)]
    with pytest.raises(ShardError, match=r"columns 'name' .*'day' .*'id' .*--apart name --apart day --apart id"):
        load_shard(csv(tmp_path / "t.csv", "name,age,day,id,y", *rows))


@pytest.mark.parametrize("cell", ["1e308", "inf", "-inf"])
def test_numbers_that_are_too_large_are_named_with_their_column(tmp_path: Path, cell: str) -> None:
    with pytest.raises(NonFiniteFeatures, match=r"too large for 32-bit floats, in the columns: 'b'"):
        load_shard(csv(tmp_path / "t.csv", "a,b,y", "1,2,0", f"1,{cell},1"))


# --- missing values


@pytest.mark.parametrize(
    "word", ["", "NA", "?", "nan", "NaN", "null", "N/A", "#N/A", "None", "-", ".", "<NA>", "n.a.", "-1.#IND", " NULL "]
)
def test_a_missing_value_is_one_everywhere(tmp_path: Path, word: str) -> None:
    path = csv(tmp_path / "t.csv", "a,y,g", *(f"{word if n == 3 else n},{n % 2},{n}" for n in range(20)))
    with pytest.raises(ShardError, match=r"lacks values in the columns \(how many\): a \(1\); --missing median"):
        load_shard(path, options=ReadOptions.of("y", apart=["g"]))
    for role in ({"label": "a"}, {"label": "y", "group": "a"}, {"label": "a>3"}, {"label": "a", "task": "regression"}):
        with pytest.raises(ShardError, match=r"1 samples of .* have nothing in the column 'a'.*--missing-words"):
            load_shard(path, options=ReadOptions.of(**role))


def test_one_option_changes_the_words(tmp_path: Path) -> None:
    assert codes(tmp_path / "t.csv", ["NA", "EU"], missing_words="nothing").labels == ["EU", "NA"]
    with pytest.raises(ShardError, match="10 samples"):
        codes(tmp_path / "t.csv", ["-999", "1", "2", "3"], missing_words="usual,-999")
    with pytest.raises(ShardError, match="have nothing"):
        codes(tmp_path / "t.csv", ["-999.0", "1"], missing_words="-999")
    assert is_missing(-999.0, words_of(["-999"])) and not is_missing(-999.0) and is_missing(float("nan"), words_of(["x"]))


@pytest.mark.parametrize("y", [["a", "nan"], ["a", "NA"], ["a", ""], [b"a", b""], [0.0, np.nan]])
def test_labels_of_arrays_that_are_missing(y: list[Any]) -> None:
    with pytest.raises(ShardError, match="missing value"):
        shard_of("kiel", (np.ones((40, 2)), np.array(y * 20)))


def test_masked_values_are_missing() -> None:
    masked = np.ma.masked_array(np.ones((40, 2)), mask=np.arange(80).reshape(40, 2) == 7)
    with pytest.raises(NonFiniteFeatures, match="hides 1 of 80 values"):
        shard_of("kiel", (masked, np.arange(40) % 2))
    with pytest.raises(ShardError, match="hides 1 of 40 values"):
        shard_of("kiel", (np.ones((40, 2)), np.ma.masked_array(np.arange(40) % 2, mask=np.arange(40) == 3)))
    filled = shard_of("kiel", (masked, np.arange(40) % 2), ReadOptions.of(missing="median")).load()
    assert filled.fill is not None and filled.fill.tolist() == [1.0, 1.0] and not np.isnan(filled.train_x).any()


def test_fill_values_come_from_the_training_part_alone(tmp_path: Path) -> None:
    rows = [f"{'' if n == 0 else 1000 if n >= 15 else n},{n % 2},{'test' if n >= 15 else 'train'}" for n in range(20)]
    shard = load_shard(csv(tmp_path / "t.csv", "a,y,split", *rows), options=ReadOptions.of("y", missing="median"))
    assert shard.fill is not None and shard.fill.tolist() == [7.5] and shard.train_x[0, 0] == 7.5


# --- files


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_that_say_what_they_are(tmp_path: Path, encoding: str) -> None:
    path = csv(tmp_path / "t.csv", "größe,y", *(f"{n},{('wär€', 'nein')[n % 2]}" for n in range(20)), encoding=encoding)
    shard = load_shard(path)
    assert (shard.column_names, shard.labels) == (("größe",), ["nein", "wär€"])


@pytest.mark.parametrize("encoding", ["cp1252", "cp1251", "utf-16-le"])
def test_other_encodings_are_refused_with_the_remedy(tmp_path: Path, encoding: str) -> None:
    words = ("да", "нет") if encoding == "cp1251" else ("wär", "nein")
    path = csv(tmp_path / "t.csv", "v,y", *(f"{n},{words[n % 2]}" for n in range(20)), encoding=encoding)
    with pytest.raises(ShardError, match=r"not in the encoding UTF-8.*CSV UTF-8.*iconv"):
        load_shard(path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("words", [("wär", "nein"), ("да", "нет"), ("はい", "𝔫")])
def test_encodings_without_a_mark_are_named_in_the_remedy(tmp_path: Path, encoding: str, words: tuple[str, str]) -> None:
    path = csv(tmp_path / "t.csv", "v,y", *(f"{n},{words[n % 2]}" for n in range(20)), encoding=encoding)
    with pytest.raises(
        ShardError, match=rf"zero bytes.*iconv -f {encoding.upper().replace('-LE', 'LE').replace('-BE', 'BE')} "
    ):
        load_shard(path)


BODY = [f"{n},{60 + n % 9}.5,{n % 2}" for n in range(20)]


@pytest.mark.parametrize(
    "lines",
    [
        ["sep=;", "age;weight;ill", *(line.replace(",", ";") for line in BODY)],
        ["age|weight|ill", *(line.replace(",", "|") for line in BODY)],
        ["age,weight,ill,", *(f"{line}," for line in BODY)],
        ["age,weight,ill", *(f"{line}," for line in BODY)],
        [",age,weight,ill", *(f"{n},{line}" for n, line in enumerate(BODY))],
        ["Unnamed: 0,age,weight,ill", *(f"{n},{line}" for n, line in enumerate(BODY))],
        ["age,weight,ill", *(f"{n},{line}" for n, line in enumerate(BODY))],
        ["age,weight,ill", *BODY, "  ", ",,", ""],
        ["", "age,weight,ill", *BODY],
        ['"age","weight","ill"', *BODY],
    ],
)
def test_what_spreadsheets_and_pandas_write(tmp_path: Path, lines: list[str]) -> None:
    shard = load_shard(csv(tmp_path / "t.csv", *lines), options=ReadOptions.of("ill"))
    assert shard.column_names == ("age", "weight") and len(shard.train_x) + len(shard.test_x) == 20
    assert shard.labels == [0, 1]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["age;weight;ill", *(line.replace(",", ";").replace(".", ",") for line in BODY)], "--decimal comma"),
        (["age,age,ill", *BODY], "several are called 'age'"),
        (["age,,ill", *BODY], "column 2 of .* has no name"),
        ([",weight,ill", *(f"{n % 3},{line[2:]}" for n, line in enumerate(BODY))], "no name, and is no index"),
        (["age,we\u200bight,ill", *BODY], "cannot be printed"),
        (["age,weight,ill", '"1,2,0', *BODY], "quotation mark"),
        (["age,weight,ill", "1,2"], "sample 1 of .* has 2 cells"),
        ([""], "is empty"),
        (["age,weight,ill"], "no samples"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(ShardError, match=message):
        load_shard(csv(tmp_path / "t.csv", *lines), options=ReadOptions.of("ill"))


def test_a_line_break_in_a_name_is_a_space(tmp_path: Path) -> None:
    shard = load_shard(csv(tmp_path / "t.csv", 'age,"weight\n(kg)",ill', *BODY), options=ReadOptions.of("ill"))
    assert shard.column_names == ("age", "weight (kg)")


def test_the_index_of_pandas_is_no_feature_unless_it_is_named(tmp_path: Path) -> None:
    metadata = {b"pandas": b'{"index_columns": ["patient"]}'}
    path = parquet(tmp_path / "t.parquet", metadata, v=np.arange(20) / 2, ill=[0, 1] * 10, patient=np.arange(20) // 2)
    shard = load_shard(path, options=ReadOptions.of("ill"))
    assert shard.column_names == ("v",) and any("left out: the column 'patient'" in note for note in shard.warnings)
    assert load_shard(path, options=ReadOptions.of("ill", group="patient")).groups is not None
    assert load_shard(path, options=ReadOptions.of("ill", columns="v,patient")).column_names == ("v", "patient")


@pytest.mark.parametrize(
    "cells",
    [
        lambda: PYARROW.array(["a", "b"] * 10).dictionary_encode(),
        lambda: PYARROW.array([b"a", b"b"] * 10),
        lambda: PYARROW.array(["a ", "b"] * 10),
    ],
)
def test_labels_of_parquet_are_those_of_csv(tmp_path: Path, cells: Callable[[], Any]) -> None:
    assert load_shard(parquet(tmp_path / "t.parquet", v=np.arange(20) / 2, y=cells())).labels == ["a", "b"]


def test_narrow_floats_have_the_text_of_csv(tmp_path: Path) -> None:
    path = parquet(tmp_path / "t.parquet", v=np.arange(20) / 2, y=PYARROW.array([1.1, 2.2] * 10, PYARROW.float32()))
    assert load_shard(path).labels == ["1.1", "2.2"]


def test_a_table_called_txt_is_a_table(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.txt", "age\tweight\till", *(line.replace(",", "\t") for line in BODY))
    assert load_shard(path, options=ReadOptions.of("ill")).column_names == ("age", "weight")


# --- what the options say


def test_a_column_called_like_a_threshold_is_the_column(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", "bp,v,bp>140", *(f"{100 + 4 * n},{n / 2},{n % 2}" for n in range(20)))
    shard = load_shard(path, options=ReadOptions.of("bp>140"))
    assert shard.column_names == ("bp", "v") and sorted(np.concatenate([shard.train_y, shard.test_y])) == [0] * 10 + [1] * 10
    other = load_shard(csv(path, "bp,v", *(f"{100 + 4 * n},{n / 2}" for n in range(20))), options=ReadOptions.of("bp>140"))
    assert sorted(np.concatenate([other.train_y, other.test_y])) == [0] * 11 + [1] * 9


def test_a_threshold_compares_whole_numbers_exactly(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", "v,id", *(f"{n / 2},{9007199254740992 + n % 2}" for n in range(20)))
    shard = load_shard(path, options=ReadOptions.of("id>9007199254740992"))
    assert sorted(np.concatenate([shard.train_y, shard.test_y])) == [0] * 10 + [1] * 10


def test_warnings_about_identifiers_and_numbers_as_classes(tmp_path: Path) -> None:
    path = csv(tmp_path / "t.csv", "id,v,dose", *(f"{1000 + n},{n % 3},{n / 10}" for n in range(40)))
    said = " ".join(load_shard(path, options=ReadOptions.of("dose")).warnings)
    assert "every value of id is another whole number" in said and "--task regression" in said
    plain = csv(path, "w,v,ill", *(f"{n / 2},{n % 3},{n % 2}" for n in range(40)))
    assert not any(
        "another whole" in note or "--task" in note for note in load_shard(plain, options=ReadOptions.of("ill")).warnings
    )


def test_test_samples_without_a_label_are_no_class(write: Any) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    with pytest.raises(ShardError, match=r"8 test samples of .* have the label -1"):
        load_shard(write(x, np.arange(40) % 2, test=(x[:8], np.full(8, -1))))
    declared = load_shard(write(x, np.arange(40) % 2, test=(x[:8], np.full(8, -1)), meta={"classes": [-1, 0, 1]}))
    assert declared.labels == [-1, 0, 1]


def test_missing_values_of_other_data_than_tables() -> None:
    x = np.random.default_rng(0).integers(0, 255, (40, 4, 4, 1), dtype=np.uint8)
    with pytest.raises(SettingError, match="--missing median is for tables"):
        shard_of("kiel", (x, np.arange(40) % 2), ReadOptions.of(missing="median"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Mild", "mild"),
        ("a", "а"),
        ("ab", "a\u200bb"),
        ("x  y", "x\u00a0y"),
        ("ﬁt", "fit"),
        ("C0", "CO"),
        ("a-b", "a–b"),
        ("true", "1"),
    ],
)
def test_what_looks_alike(one: str, other: str) -> None:
    assert look(one) == look(other) and look("fail") != look("fall") and look("01") != look("1")


@pytest.mark.parametrize(
    "title",
    [
        ["Report of ward 3"],
        ["Report of ward 3,,"],
        ["Report", "made 2024-01-03"],
        ["Report,,", "of,ward 3,", ",,"],
        ["# made by X"],
    ],
)
@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_title_above_the_names_is_called_a_title(tmp_path: Path, title: list[str], mark: str) -> None:
    lines = [line.replace(",", mark) for line in [*title, "age,weight,ill", *BODY]]
    with pytest.raises(ShardError, match=r"title.*'age', 'weight', 'ill'.*remove the lines? above"):
        load_shard(csv(tmp_path / "t.csv", *lines), options=ReadOptions.of("ill"))


def test_formulas_that_keep_codes_as_text_are_their_text(tmp_path: Path) -> None:
    assert codes(tmp_path / "t.csv", ['="0117"', '"=""0118"""', "0119"]).labels == ["0117", "0118", "0119"]


@pytest.mark.parametrize("head", ["Y,y,v", "label,y,v", "Label,label,v"])
def test_two_columns_with_the_usual_name_of_the_class_are_asked_about(tmp_path: Path, head: str) -> None:
    first, second, _ = head.split(",")
    with pytest.raises(SettingError, match=rf"say --label.*{first!r} and {second!r}"):
        load_shard(csv(tmp_path / "t.csv", head, *(f"{n % 3},{n % 2},{n / 2}" for n in range(20))))


@pytest.mark.parametrize(
    "word", ["#DIV/0!", "#VALUE!", "#REF!", "--", "???", "*", "unknown", "k.A.", "Missing", "(null)", "-1", "999"]
)
def test_a_class_that_seems_to_mean_a_missing_value_is_said(tmp_path: Path, word: str) -> None:
    shard = codes(tmp_path / "t.csv", ["ill", "well", "ill", "well", word])
    assert any(word in note and "--missing-words" in note for note in shard.warnings), shard.warnings
    assert not any("--missing-words" in note for note in codes(tmp_path / "t.csv", ["ill", "well", "A+", "3a"]).warnings)
    assert not any("--missing-words" in note for note in codes(tmp_path / "t.csv", ["-1", "1"]).warnings)


def test_a_number_for_unknown_among_numbers_is_said(tmp_path: Path) -> None:
    assert any("-1" in note and "--missing-words" in note for note in codes(tmp_path / "t.csv", ["0", "1", "2", "-1"]).warnings)
    assert any("99" in note and "--missing-words" in note for note in codes(tmp_path / "t.csv", ["0", "1", "2", "99"]).warnings)
    assert not any("--missing-words" in note for note in codes(tmp_path / "t.csv", [str(n) for n in range(100)]).warnings)


@pytest.mark.parametrize("form", ["csv", "parquet", "array"])
def test_whole_numbers_that_a_float_cannot_tell_apart_are_said(tmp_path: Path, form: str) -> None:
    numbers, y = [2**62 + n for n in range(40)], [n % 2 for n in range(40)]
    if form == "csv":
        shard = load_shard(csv(tmp_path / "t.csv", "v,w,y", *(f"{v},{v % 5},{c}" for v, c in zip(numbers, y, strict=True))))
    elif form == "parquet":
        columns = {"v": PYARROW.array(numbers, PYARROW.uint64()), "w": [v % 5 for v in numbers], "y": y}
        shard = load_shard(parquet(tmp_path / "t.parquet", **columns))
    else:
        shard = shard_of("kiel", (np.array(numbers)[:, np.newaxis], y)).load()
    assert any("digits" in note for note in shard.warnings), shard.warnings


def test_a_first_line_of_values_is_said(tmp_path: Path) -> None:
    shard = load_shard(
        csv(tmp_path / "t.csv", "0.5,7,1", *(f"{n / 2},{n},{n % 2}" for n in range(20))), options=ReadOptions.of("1")
    )
    assert any("0.5" in note and "first line" in note for note in shard.warnings), shard.warnings
    pixels = load_shard(
        csv(tmp_path / "t.csv", "0,1,2", *(f"{n / 2},{n},{n % 2}" for n in range(20))), options=ReadOptions.of("2")
    )
    assert not any("first line" in note for note in pixels.warnings)


def test_rows_of_masked_arrays_keep_their_mask() -> None:
    rows = [np.ma.masked_array([n, 1.0], mask=[n == 3, False]) for n in range(40)]
    with pytest.raises(NonFiniteFeatures, match="hides 1 of 80 values"):
        shard_of("kiel", (rows, np.arange(40) % 2))


def test_booleans_are_features_and_meta_tensors_are_refused() -> None:
    torch = pytest.importorskip("torch")
    assert shard_of("kiel", (np.arange(80).reshape(40, 2) % 3 > 0, np.arange(40) % 2)).load().kind == "tabular"
    with pytest.raises(ShardError, match="x of kiel cannot be made an array"):
        shard_of("kiel", (torch.empty(40, 2, device="meta"), np.arange(40) % 2))


def test_numbers_that_mean_missing_values_mean_so_in_arrays(tmp_path: Path) -> None:
    x, y = np.arange(80.0).reshape(40, 2), np.arange(40) % 2
    x[3, 1] = x[30, 0] = -999
    given = ReadOptions.of(missing="median", missing_words="usual,-999")
    np.savez(tmp_path / "t.npz", train_x=x.astype(int), train_y=y)
    for shard in (shard_of("kiel", (x, y), given).load(), load_shard(tmp_path / "t.npz", options=given)):
        assert min(shard.train_x.min(), shard.test_x.min()) >= 0
    with pytest.raises(NonFiniteFeatures, match="2 NaN"):
        shard_of("kiel", (x, y), ReadOptions.of(missing_words="usual,-999"))
    for labels in (np.where(y == 1, -999, 0), np.where(y == 1, -999.0, 0.0)):
        with pytest.raises(ShardError, match=r"20 labels that mean a missing value.*--missing-words"):
            shard_of("kiel", (x, labels), given)
    with pytest.raises(ShardError, match=r"20 .*missing value"):
        shard_of(
            "kiel",
            (x, np.where(y == 1, -999.0, 0.5)),
            ReadOptions.of(missing="median", missing_words="-999", task="regression"),
        )
