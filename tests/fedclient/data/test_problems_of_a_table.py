"""A table with several problems names all of them at once: columns, labels, parts and missing values."""

from __future__ import annotations

from pathlib import Path

import pytest

from attune.common.errors import AttuneError
from attune.fedclient.data.shard import load_shard
from attune.fedclient.read_options import ReadOptions


def problems(path: Path, **options: str) -> str:
    with pytest.raises(AttuneError) as raised:
        load_shard(path, options=ReadOptions.of(**options))
    return str(raised.value)


def table(path: Path) -> Path:
    """Write a table with a column of text, one with a gap, a label that is missing, and a word that names no part."""
    rows = [f"{n % 5}.5,{n % 7},word{n},{n % 2},train" for n in range(40)]
    rows[3] = "1.5,,word,1,train"
    rows[4] = "1.5,2,word,,train"
    rows[5] = "1.5,2,word,1,perhaps"
    path.write_text("\n".join(["age,dose,town,ill,part", *rows]) + "\n")
    return path


def test_all_problems_of_a_table_are_named(tmp_path: Path) -> None:
    said = problems(table(tmp_path / "kiel.csv"), label="ill", split="part")
    for what in ("town", "'ill'", "perhaps"):
        assert what in said, said
    assert said.splitlines()[0] == "3 problems:"


def test_gaps_are_named_beside_a_missing_label(tmp_path: Path) -> None:
    text = table(tmp_path / "kiel.csv").read_text().replace("perhaps", "test").replace("word", "1")
    (tmp_path / "kiel.csv").write_text(text)
    said = problems(tmp_path / "kiel.csv", label="ill", split="part")
    assert "dose (1)" in said and "'ill'" in said, said


def test_one_problem_stays_as_it_is(tmp_path: Path) -> None:
    text = table(tmp_path / "kiel.csv").read_text().replace("perhaps", "test").replace(",word,,", ",word,1,")
    (tmp_path / "kiel.csv").write_text(text)
    said = problems(tmp_path / "kiel.csv", label="ill", split="part", apart=("town",))
    assert "problems:" not in said and "dose (1)" in said
