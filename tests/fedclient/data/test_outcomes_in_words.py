"""Outcomes in words: yes and no are 1 and 0, and what is no number is refused with what helps for an outcome."""

from pathlib import Path

import pytest

from attune.common.errors import SettingError, ShardError
from attune.fedclient.data.shard import load_shard
from attune.fedclient.read_options import ReadOptions


def table(folder: Path, event: tuple[str, str] = ("no", "yes"), number: str = "7") -> Path:
    path = folder / "t.csv"
    rows = (f"{n % 7}.5,{n % 30},{event[n % 2]},{('nein', 'JA')[n % 2]},{'1.5' if n % 3 else number}\n" for n in range(80))
    path.write_text("v,months,died,cough,cost\n" + "".join(rows))
    return path


def options(task: str, label: str, schema: str = "") -> ReadOptions:
    return ReadOptions.of(label, task=task, columns="v", schema=schema)


@pytest.mark.parametrize("schema", ["", "auto"])
@pytest.mark.parametrize("words", [("no", "yes"), ("Nein", "Ja"), ("false", "true"), ("0", "1"), ("n", "1")])
def test_words_for_yes_and_no_are_1_and_0(tmp_path: Path, words: tuple[str, str], schema: str) -> None:
    survival = load_shard(table(tmp_path, words), options=options("survival", "months,died", schema))
    assert {(int(time) % 2, event) for time, event in survival.train_y.tolist()} == {(0, 0.0), (1, 1.0)}
    several = load_shard(table(tmp_path, words), options=options("multilabel", "died,cough", schema))
    assert {tuple(row) for row in several.train_y.tolist()} == {(0.0, 0.0), (1.0, 1.0)}


@pytest.mark.parametrize(
    ("task", "label", "event", "number", "words"),
    [
        ("survival", "months,died", ("alive", "dead"), "7", r"'died' \('alive' in sample 1\).*the event.*0 .*1"),
        ("survival", "cost,died", ("no", "yes"), "long", r"'cost' \('long' in sample 1\).*a number"),
        ("multilabel", "died,cough", ("alive", "dead"), "7", r"'died' \('alive' in sample 1\).*yes or no.*0 .*1"),
        ("regression", "cost", ("no", "yes"), "<5", r"'cost' \('<5' in sample 1\).*a number"),
        ("regression", "cost", ("no", "yes"), "dear", r"'cost' \('dear' in sample 1\).*a number"),
    ],
)
def test_other_words_are_refused_with_what_helps(
    tmp_path: Path, task: str, label: str, event: tuple[str, str], number: str, words: str
) -> None:
    for schema in ("", "auto"):
        with pytest.raises(ShardError, match=words) as error:
            load_shard(table(tmp_path, event, number), options=options(task, label, schema))
        assert "to be predicted" in str(error.value)
        assert not any(useless in str(error.value) for useless in ("--schema", "--apart"))


def test_a_threshold_names_the_cell_that_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"'dear' in sample 1"):
        load_shard(table(tmp_path, number="dear"), options=options("classes", "cost>5"))
