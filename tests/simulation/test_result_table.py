"""Tables of results: each form has the same numbers, the best is in bold, and text is escaped."""

import csv
import io
from pathlib import Path

import pytest

from attune.common.errors import SettingError
from attune.common.text import csv_cell
from attune.simulation.result_table import ResultTable, Spread, check_table, spread_of

TABLE = ResultTable(
    ("method", "seeds", "kept", "own"),
    [
        ["fedavg+ft", 3, Spread(0.8124, 0.01), 0.5],
        ["a_b & <c>", 3, Spread(0.8121, 0.2), 0.75],
        ["=SUM(A1)", 1, None, None],
    ],
    ("kept", "own"),
)


def test_text_has_mean_and_deviation() -> None:
    assert repr(TABLE).splitlines()[1].split() == ["fedavg+ft", "3", "0.812", "±", "0.010", "0.500"]
    assert repr(TABLE).splitlines()[3].split() == ["=SUM(A1)", "1", "-", "-"]


def test_csv_has_full_numbers_and_a_column_for_deviations() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.to_csv())))
    assert rows[0] == ["method", "seeds", "kept", "kept deviation", "own"]
    assert rows[1] == ["fedavg+ft", "3", "0.8124", "0.01", "0.5"]
    assert rows[3] == ["'=SUM(A1)", "1", "", "", ""], "a spreadsheet would run the formula"
    assert [csv_cell(label) for label in ("+", "-", "@", "-1", "+x")] == ["+", "-", "@", "-1", "'+x"], "a sign is a class"


def test_latex_marks_the_best_of_each_column_and_ties_as_they_are_shown() -> None:
    lines = TABLE.to_latex().splitlines()
    assert lines[1] == r"\begin{tabular}{lrrr}" and lines[-1] == r"\end{tabular}"
    assert lines[5] == r"fedavg+ft & 3 & \textbf{0.812} $\pm$ 0.010 & 0.500 \\"
    assert lines[6] == r"a\_b \& \textless{}c\textgreater{} & 3 & \textbf{0.812} $\pm$ 0.200 & \textbf{0.750} \\"


def test_html_is_escaped_and_marks_the_best() -> None:
    text = TABLE.to_html()
    assert "<td>a_b &amp; &lt;c&gt;</td>" in text and "<td><strong>0.812</strong> ± 0.010</td>" in text
    assert "<td>0.500</td>" in text and TABLE._repr_html_() == text


def test_the_best_of_a_row_is_among_the_compared_columns_and_needs_a_rival() -> None:
    table = ResultTable(("device", "a", "b", "c"), [["x", 0.5, 0.25, 0.9], ["y", None, 0.5, 0.9]], ("a", "b"), "row")
    assert [line for line in table.to_latex().splitlines() if line[0] in "xy"] == [
        r"x & \textbf{0.500} & 0.250 & 0.900 \\",
        r"y & - & 0.500 & 0.900 \\",
    ]


def test_another_suffix_a_folder_and_a_file_in_place_of_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"a table is a file \.csv, \.tex, \.html"):
        TABLE.save(tmp_path / "t.xlsx")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(SettingError, match="is a folder, and a file is needed"):
        check_table(tmp_path / "folder.csv")
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="cannot be a folder"):
        check_table(tmp_path / "file" / "t.csv")


def test_a_deviation_is_that_of_a_sample_and_a_missing_value_leaves_no_mean() -> None:
    """Expect a deviation of 1 for 1, 2 and 3: the sum of squares, 2, over n - 1 = 2."""
    assert spread_of([1.0, 2.0, 3.0]) == Spread(2.0, 1.0)
    assert spread_of([0.5]) == Spread(0.5, None)
    assert spread_of([0.5, None]) is None and spread_of([]) is None
