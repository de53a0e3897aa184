"""Reader of text with roles.

It has one of three forms: plays (ROLE, a tab, the line), `ROLE:` before each speech, or a table with columns role and line. In
plays further lines of a speech begin with a tab, and stage directions are in square brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from attune.common.errors import ShardError
from attune.fedclient.data.arrays import MAX_TEXT_BYTES, files_in, plain_suffix, read_text
from attune.fedclient.read_options import ReadOptions
from attune.simulation.partition.samples import Corpus, corpus

_NAME = re.compile(r"[A-Z][^:;\t]{0,31}")  # longer ones are verses
_HEADING = re.compile(r"(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION)\b[ \t]*[IVXL]*\b")
_BEGIN = re.compile(r"(ACT|SCENE)[ \t]+I\b|PROLOGUE$|INDUCTION$", re.MULTILINE)
_BRACE = "| "  # joins the names of several who speak at once
_DIRECTION = re.compile(r"\[[^\]]*\]")


def recognises(path: Path) -> bool:
    """Return whether this reader can read the path, by names or a first line."""
    if path.is_file():
        return plain_suffix(path) == ".txt" or (plain_suffix(path) == ".tsv" and {"role", "line"} <= {*_head(path).split("\t")})
    return path.is_dir() and any(plain_suffix(file) == ".txt" for file in files_in(path))


def read(path: Path, options: ReadOptions) -> Corpus:
    """Read a file or a folder of plays. Roles of equal names in different files are different roles.

    Raises:
        ShardError: There is no role.
    """
    lines: dict[str, list[str]] = {}
    if path.is_file() and plain_suffix(path) == ".tsv":
        _gather(lines, "", _table(path, read_text(path)))
    else:
        files = [path] if path.is_file() else [file for file in files_in(path) if plain_suffix(file) == ".txt"]
        left = MAX_TEXT_BYTES
        for file in files:
            text = read_text(file, left)
            left -= len(text)
            _gather(lines, f"{file.stem} " if path.is_dir() else "", lines_of_play(text) if _is_play(text) else _script(text))
    if not lines:
        raise ShardError(
            f"no roles in {path}: a line begins with ROLE and a tab, or ROLE: stands before each speech on a line of its own"
        )
    return corpus(path.resolve().name.partition(".")[0], ((role, "\n".join(said)) for role, said in lines.items()))


def _gather(lines: dict[str, list[str]], prefix: str, said: Iterator[tuple[str, str]]) -> None:
    for role, line in said:
        lines.setdefault(prefix + role, []).append(line)


def _head(path: Path) -> str:
    return read_text(path).partition("\n")[0]


def _table(path: Path, text: str) -> Iterator[tuple[str, str]]:
    head, _, rest = text.partition("\n")
    columns = head.split("\t")
    role, line = columns.index("role"), columns.index("line")
    play = columns.index("play") if "play" in columns else None
    for number, row in enumerate(rest.splitlines()):
        cells = row.split("\t")
        if len(cells) != len(columns):
            raise ShardError(f"line {number + 2} of {path} has {len(cells)} cells, the first names {len(columns)} columns")
        yield (f"{cells[play]} " if play is not None else "") + cells[role], cells[line]


def _is_play(text: str) -> bool:
    return bool(re.search(r"^\S[^\t\n]*\t", text, re.MULTILINE))


def _script(text: str) -> Iterator[tuple[str, str]]:
    role = ""
    fresh = True  # a name stands only after a blank line
    for line in text.splitlines():
        words = " ".join(line.split())
        if fresh and words.endswith(":") and _NAME.fullmatch(words[:-1]):
            role = words[:-1]
        elif words and role:
            yield role, words
        fresh = not words


def lines_of_play(text: str) -> Iterator[tuple[str, str]]:
    """Yield (role, line) in order, from the first act or scene on. The list of persons before it is skipped."""
    begin = _BEGIN.search(text)
    role = ""
    for line in _DIRECTION.sub("", text[begin.start() if begin else 0 :]).splitlines():
        name, tab, said = line.partition("\t")
        if _HEADING.match(line) or (line.strip() and not tab):
            role = ""
            continue
        if _NAME.fullmatch(name.strip(" :")):
            role = name.strip(" :")
        words = " ".join(said.split()).lstrip(_BRACE)
        if role and words:
            yield role, words
