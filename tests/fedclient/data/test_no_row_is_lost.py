"""Every row that a file holds is read, or the numbers of both are said."""

import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attune.common.errors import ShardError
from attune.fedclient.data.table import read_table
from tests.needs import Later, needs

OPENPYXL, PARQUET, ARROW = Later("openpyxl"), Later("pyarrow.parquet"), Later("pyarrow")
STRAY = 'v,w,ill,remark\n{above}3,5.0,0,"see below\n{inside}2,15.0,0,see above"\n{below}'


def rows(count: int, at: int = 0) -> str:
    return "".join(f"{n % 7},{n * 0.5},{n % 2},note {n}\n" for n in range(at, at + count))


def sheet(path: Path, change: Callable[[bytes], bytes]) -> Path:
    """Write a book of 20 patients, with another XML of its sheet."""
    book = OPENPYXL.Workbook()
    book.active.append(["v", "w", "ill"])
    for n in range(20):
        book.active.append([n % 7, n * 0.5, n % 2])
    book.save(path.with_suffix(".plain"))
    with zipfile.ZipFile(path.with_suffix(".plain")) as source, zipfile.ZipFile(path, "w") as target:
        for entry in source.namelist():
            data = source.read(entry)
            target.writestr(entry, change(data) if entry == "xl/worksheets/sheet1.xml" else data)
    return path


@needs("openpyxl")
@pytest.mark.parametrize("declared", ["A1:C7", "A1", "A1:B21", "A1:A21", "B2:C21", "A1:Z99"])
def test_a_sheet_is_read_beyond_what_it_declares(tmp_path: Path, declared: str) -> None:
    ref = b'<dimension ref="%s"/>' % declared.encode()
    path = sheet(tmp_path / "t.xlsx", lambda xml: re.sub(rb'<dimension ref="[^"]*"\s*/>', ref, xml))
    read = read_table(path)
    assert read.names == ["v", "w", "ill"] and len(read) == 20
    assert read.cells["w"][-1] == "9.5" and read.cells["ill"][-1] == "1"


@needs("openpyxl")
@pytest.mark.parametrize(
    ("pattern", "by", "read"),
    [
        (rb'r="(\w?)9"', rb'r="\g<1>4"', 57),
        (rb'r="C9"', rb'r="B9"', 62),
        (rb'(<c r="B9".*?</c>)(<c r="C9".*?</c>)', rb"\2\1", 62),
    ],
    ids=["a row's number twice", "a cell's place twice", "cells out of order"],
)
def test_cells_that_the_library_leaves_out_are_counted(tmp_path: Path, pattern: bytes, by: bytes, read: int) -> None:
    with pytest.raises(ShardError, match=f"holds 63 cells with values, and {read} could be read"):
        read_table(sheet(tmp_path / "t.xlsx", lambda xml: re.sub(pattern, by, xml)))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("inside", [20, 1, 0])
def test_rows_between_stray_quotation_marks_are_said(tmp_path: Path, inside: int, delimiter: str) -> None:
    text = STRAY.format(above=rows(10), inside=rows(inside, 11), below=rows(20, 40))
    (tmp_path / "t.csv").write_text(text.replace(",", delimiter))
    notes = " ".join(read_table(tmp_path / "t.csv").notes)
    lines, read = 32 + inside, 31
    assert f"{lines} lines below the names are only {read} rows" in notes
    assert f"lines 12 to {13 + inside}" in notes and f"{inside + 1} of the joined lines look like rows" in notes


def test_marks_around_all_rows_are_said(tmp_path: Path) -> None:
    text = "v,w,ill,remark\n" + rows(30)
    (tmp_path / "t.csv").write_text(text.replace("note 0\n", '"note 0\n').replace("note 29\n", 'note 29"\n'))
    read = read_table(tmp_path / "t.csv")
    assert len(read) == 1 and "30 lines below the names are only 1 rows" in " ".join(read.notes)


def test_a_stray_mark_in_another_column_is_said_too(tmp_path: Path) -> None:
    inner = "".join(f"x{n},{n},{n % 2}\n" for n in range(9))
    (tmp_path / "t.csv").write_text(f'a,b,c\n{inner}"x,5,1\n{inner}y",6,0\n{inner}')
    assert "look like rows" in " ".join(read_table(tmp_path / "t.csv").notes)


@pytest.mark.parametrize(
    "text",
    [
        "v,w,ill,remark\n" + "".join(f'{n},{n / 2},{n % 2},"note {n}, and\nmore"\n' for n in range(30)),
        "text,label\n"
        + "".join(f'"Dear {n},\nthanks for nothing, really\nbye, all",{("good", "bad")[n % 2]}\n' for n in range(30)),
        "label,text\n" + "".join(f'{n % 2},"one\n\ntwo, three\n{n}"\n' for n in range(30)),
    ],
)
def test_line_breaks_within_quotation_marks_are_quiet(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    read = read_table(tmp_path / "t.csv")
    assert len(read) == 30 and not read.notes


def test_an_open_quotation_mark_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('\nv,w\n1,2\n3,"a\nb"\n5,"six\n7,8\n')
    with pytest.raises(ShardError, match="in the row that begins in line 6"):
        read_table(tmp_path / "t.csv")


@needs("pyarrow")
def test_a_parquet_file_with_other_rows_than_it_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    PARQUET.write_table(ARROW.table({"v": list(range(60)), "ill": [0, 1] * 30}), path)
    data: Any = path.read_bytes()
    said = b"\x16\x78\x19\x1c\x19"  # the footer: 60 rows, then the row groups
    assert data.count(said) == 1
    path.write_bytes(data.replace(said, b"\x16\x28\x19\x1c\x19"))
    with pytest.raises(ShardError, match="says that it holds 20 rows, and 60 could be read"):
        read_table(path)
