"""Tables of results as text, CSV, LaTeX, HTML and pandas. The best value is in bold in LaTeX and HTML."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

from attune.common.durable import PUBLIC, check_folder, write_file
from attune.common.errors import SettingError
from attune.common.text import aligned, csv_cell

DIGITS = 3
MODELS = ("alone", "local", "common", "personalized")  # columns of a device's models, where it has them
SCORES = (*MODELS, "accuracy", "kept", "served", "constant")  # columns of all scores of a device
BEST_OF = (*MODELS, "kept")  # the best is in bold
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}"}
_LATEX |= {">": r"\textgreater{}", "±": r"$\pm$"} | {sign: f"\\{sign}" for sign in "&%$#_{}"}


@dataclass(frozen=True)
class Spread:
    """Mean of a figure over seeds, and its standard deviation; None with one seed."""

    mean: float
    deviation: float | None

    def __str__(self) -> str:
        return f"{self.mean:.{DIGITS}f}" + ("" if self.deviation is None else f" ± {self.deviation:.{DIGITS}f}")


Cell = str | int | float | Spread | None


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Return mean and sample standard deviation over seeds; None if a value is missing, since means of fewer seeds mislead."""
    known = list(values)
    numbers = [value for value in known if value is not None]
    if not numbers or len(numbers) < len(known):
        return None
    return Spread(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None)


def scores_of(rows: Collection[object]) -> list[str]:
    """Return the columns of scores for these devices, without those of models that none of them has."""
    return [name for name in SCORES if name not in MODELS or any(getattr(row, name) is not None for row in rows)]


@dataclass(frozen=True)
class ResultTable:
    """Rows of results under their heads.

    Attributes:
        heads: Names of the columns.
        rows: Cells of each row, in the order of the heads.
        compared: Columns whose best value is in bold. Larger is better.
        best: Whether the best value of each column or of each row is in bold.
        note: What the columns mean, in LaTeX as a comment, in HTML as a caption.
    """

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    compared: Collection[str] = ()
    best: Literal["column", "row"] = "column"
    note: str = ""

    def __repr__(self) -> str:
        """Return an aligned table."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the lines of an aligned table."""
        return aligned([list(self.heads), *([text_of(cell) for cell in row] for row in self.rows)], self._words())

    def to_csv(self) -> str:
        """Return the table as CSV. A column with deviations gets a second one, `NAME deviation`."""
        heads, rows = self._plain()
        file = io.StringIO(newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(heads)
        writer.writerows([csv_cell(value) for value in row] for row in rows)
        return file.getvalue()

    def to_latex(self) -> str:
        """Return a tabular of LaTeX with the rules of its package booktabs."""
        columns = "".join("l" if at in self._words() else "r" for at in range(len(self.heads)))
        lines = [r" & ".join(row) + r" \\" for row in self._marked(_latex, lambda text: rf"\textbf{{{text}}}")]
        head = r" & ".join(map(_latex, self.heads)) + r" \\"
        top = ["% needs \\usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"]
        note = [f"% {self.note}"] if self.note else []
        return "\n".join([*top, *lines, r"\bottomrule", r"\end{tabular}", *note, ""])

    def to_html(self) -> str:
        """Return a table element of HTML."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.heads)
        rows = self._marked(html.escape, lambda text: f"<strong>{text}</strong>")
        body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        note = f"<caption>{html.escape(self.note)}</caption>\n" if self.note else ""
        return f"<table>\n{note}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n"

    _repr_html_ = to_html  # a notebook shows it

    def to_pandas(self) -> Any:
        """Return a DataFrame with the columns of `to_csv`. Needs pandas."""
        import pandas

        heads, rows = self._plain()
        return pandas.DataFrame(rows, columns=heads)

    def save(self, path: str | Path) -> Path:
        """Write a file whose suffix says the form: .csv, .tex or .html.

        Raises:
            SettingError: The suffix is another one, or the file cannot be written.
        """
        file = check_table(Path(path))
        text = FORMS[file.suffix.lower()](self)
        if file.suffix.lower() == ".html":
            text = f'<!doctype html>\n<meta charset="utf-8">\n<title>{html.escape(file.stem)}</title>\n{text}'
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, text.encode(), PUBLIC)
        return file

    def _words(self) -> list[int]:
        """Return the places of the columns of words, which are aligned to the left."""
        return [at for at in range(len(self.heads)) if any(isinstance(row[at], str) for row in self.rows)]

    def _plain(self) -> tuple[list[str], list[list[str | int | float | None]]]:
        """Return heads and rows in which each mean and each deviation has a cell of its own."""
        wide = {at for at in range(len(self.heads)) if any(_deviation(row[at]) is not None for row in self.rows)}
        heads = [
            name for at, head in enumerate(self.heads) for name in ((head, f"{head} deviation") if at in wide else (head,))
        ]
        rows: list[list[str | int | float | None]] = []
        for row in self.rows:
            plain: list[str | int | float | None] = []
            for at, cell in enumerate(row):
                plain.append(cell.mean if isinstance(cell, Spread) else cell)
                plain += [_deviation(cell)] if at in wide else []
            rows.append(plain)
        return heads, rows

    def _marked(self, escape: Callable[[str], str], bold: Callable[[str], str]) -> list[list[str]]:
        """Return the escaped cells, with the best mean in bold. Means that are shown alike are equally good."""
        places = [at for at, head in enumerate(self.heads) if head in self.compared]
        shown = [[_rounded(cell) if at in places else None for at, cell in enumerate(row)] for row in self.rows]
        marked = []
        for row, cells in zip(self.rows, shown, strict=True):
            line = []
            for at, cell in enumerate(row):
                rivals = cells if self.best == "row" else [other[at] for other in shown]
                known = [value for value in rivals if value is not None]
                wins = cells[at] is not None and len(known) > 1 and cells[at] == max(known)
                number, sign, deviation = text_of(cell).partition(" ± ")
                line.append((bold(escape(number)) if wins else escape(number)) + escape(sign + deviation))
            marked.append(line)
        return marked


FORMS: Mapping[str, Callable[[ResultTable], str]] = {
    ".csv": ResultTable.to_csv,
    ".tex": ResultTable.to_latex,
    ".html": ResultTable.to_html,
}


def check_table(path: Path, option: str = "--table") -> Path:
    """Return the path, expanded, after a check that a table can be written there.

    Raises:
        SettingError: Its suffix is none of FORMS, it is a folder, or the file cannot be written.
        DiskFull: The disk has no space.
    """
    file = path.expanduser()
    if file.suffix.lower() not in FORMS:
        raise SettingError(f"{option} {path}: a table is a file {', '.join(FORMS)}; give it one of these suffixes")
    if file.is_dir():
        raise SettingError(f"{option} {path} is a folder, and a file is needed")
    check_folder(file.parent, option)
    return file


def text_of(cell: Cell) -> str:
    """Return a cell as text: numbers with three digits, a dash for none."""
    if cell is None:
        return "-"
    return f"{cell:.{DIGITS}f}" if isinstance(cell, float) else str(cell)


def _rounded(cell: Cell) -> float | None:
    value = cell.mean if isinstance(cell, Spread) else cell
    return round(value, DIGITS) if isinstance(value, (int, float)) else None


def _deviation(cell: Cell) -> float | None:
    return cell.deviation if isinstance(cell, Spread) else None


def _latex(text: str) -> str:
    return re.sub("|".join(map(re.escape, _LATEX)), lambda match: _LATEX[match.group()], text)
