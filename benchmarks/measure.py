"""How large and how readable this repository is, in numbers: `make measure`.

How things are counted:

- The product is every Python file in common, fedserver, fedclient, simulation and contrib, without generated code (`pb/`). The
  root `__init__.py`, 20 lines that name the public interface, is left out. The spine is common, fedserver and fedclient.
- A code line is a line with anything on it but blanks, a comment or a docstring. All lines of other multi-line strings count.
- A function's length is its lines from `def` (without decorators) to its end, as they stand in the file.
- Words are what stands between blanks, in all *.md that git knows or would add, outside tests/, and without what stands between
  `<!-- generated ... -->` and `<!-- end generated -->`.
- `benchmarks/way.py` says what the way of an update is.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
SPINE = ("common", "fedserver", "fedclient")
PRODUCT = (*SPINE, "simulation", "contrib")
MAX_FILE_LINES, MAX_CELL, MAX_TEST_NAME = 400, 200, 80
SHARED_MODULE_NAMES = ("__init__", "base", "registry")
VERBS = "tests/docs/verbs.txt"
# The first words that no docstring of a class, a module or a property may have. "Whether" is fine for a property.
NO_FIRST_WORDS = frozenset(
    ("Of", "As", "By", "Who", "Whose", "Whom", "What", "Where", "Whether", "Here", "There", "Nobody", "Nothing", "Maybe")
)
THIRD_PERSON = frozenset(("Carries", "Finds", "Gives", "Holds", "Issues", "Keeps", "Makes", "Owns", "Reads", "Sends", "Trains"))
VAGUE = ("found", "each", "own", "told")
RUFF_RULES = ("--select=D,D401", "--ignore=D102,D105,D107", "--config=lint.pydocstyle.convention='google'")
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_GENERATED = re.compile(r"<!-- generated\b.*?<!-- end generated -->", re.DOTALL)
_TEST = re.compile(r"^[ \t]*(?:async )?def (test_\w+)", re.MULTILINE)
_FIRST_WORD = re.compile(r"[^\W\d_][\w'-]*")
_FIELD = re.compile(r"[a-z_]+:")
_LIKE_A_CLASS = re.compile(r"[A-Z][a-z]")
_CELL = re.compile(r"(?<!\\)\|")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@dataclass(frozen=True)
class Source:
    """One Python file.

    Attributes:
        path: Relative to the repository's root.
        text: All of it.
    """

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Syntax tree."""
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        """Number of all lines."""
        return len(self.text.splitlines())

    @cached_property
    def code_lines(self) -> int:
        """Number of lines with code on them: no blanks, comments or docstrings."""
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        for node in self.documented():
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
        return len(lines)

    def documented(self) -> Iterator[Documented]:
        """Yield the module, classes and functions that have a docstring."""
        for node in ast.walk(self.tree):
            if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
                yield node

    def functions(self) -> Iterator[Function]:
        """Yield all functions and methods, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def class_names(self) -> Iterator[str]:
        """Yield the names of all classes, nested ones too."""
        return (node.name for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def alias_names(self) -> Iterator[str]:
        """Yield the names of the module's type aliases: what is written like a class, and is assigned."""
        targets = (target for node in self.tree.body if isinstance(node, ast.Assign) for target in node.targets)
        return (target.id for target in targets if isinstance(target, ast.Name) and _LIKE_A_CLASS.match(target.id))


def listed(root: Path, pattern: str) -> list[Path]:
    """Return the files that git knows or would add, relative to `root`, sorted."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", pattern]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return [Path(name) for name in sorted({*names} - {""}) if (root / name).is_file()]


def sources(root: Path, packages: Sequence[str] = PRODUCT) -> list[Source]:
    """Return the Python files of some top-level folders, without generated code."""
    paths = [path for path in listed(root, "*.py") if path.parts[0] in packages and "pb" not in path.parts]
    return [Source(path, (root / path).read_text(encoding="utf-8")) for path in paths]


def is_property(node: Documented) -> bool:
    """Return whether a function is read like an attribute."""
    decorators = node.decorator_list if isinstance(node, Function) else []
    return any(ast.unparse(decorator).rpartition(".")[2] in ("property", "cached_property") for decorator in decorators)


def has_bad_first_word(node: Documented, verbs: frozenset[str]) -> bool:
    """Return whether a docstring begins with a word that it should not begin with.

    A function's must begin with an imperative verb of `verbs`; the others' must not begin with one of NO_FIRST_WORDS. A
    class or a module is a thing, so "Carries out …" with THIRD_PERSON is no better, nor is a field of it.
    """
    text = (ast.get_docstring(node) or "").lstrip()
    match = _FIRST_WORD.match(text)
    word = match[0] if match else ""
    if isinstance(node, ast.ClassDef) and _FIELD.match(text):
        return True
    if is_property(node):
        return word in NO_FIRST_WORDS - {"Whether"}
    return word not in verbs if isinstance(node, Function) else word in NO_FIRST_WORDS | THIRD_PERSON


def bad_first_words(source: Source, verbs: frozenset[str]) -> list[str]:
    """Return a line "path:line: summary" for each docstring of a file with a bad first word."""
    return [
        f"{source.path}:{node.body[0].lineno}: {(ast.get_docstring(node) or '').partition(chr(10))[0]}"
        for node in source.documented()
        if has_bad_first_word(node, verbs)
    ]


def vague_variables(source: Source) -> list[str]:
    """Return a line "path:line: name" for each variable or parameter whose name says too little."""
    places = [(node.lineno, node.arg) for node in ast.walk(source.tree) if isinstance(node, ast.arg)]
    stored = (node for node in ast.walk(source.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    places += [(node.lineno, node.id) for node in stored]
    return [f"{source.path}:{line}: {name}" for line, name in sorted(places) if name in VAGUE]


def read_verbs(path: Path) -> frozenset[str]:
    """Return the words of a list, one a line."""
    return frozenset(path.read_text(encoding="utf-8").split())


def duplicate_classes(files: Sequence[Source]) -> dict[str, list[str]]:
    """Return the class names that another class or a type alias has too, each with its files."""
    places, classes = defaultdict(list), set[str]()
    for source in files:
        names = list(source.class_names())
        classes |= set(names)
        for name in (*names, *source.alias_names()):
            places[name].append(str(source.path))
    return {name: paths for name, paths in sorted(places.items()) if len(paths) > 1 and name in classes}


def duplicate_modules(files: Sequence[Source]) -> dict[str, list[str]]:
    """Return the module names "package/name" that stand more than once in one top-level package, each with its files."""
    places = defaultdict(list)
    for source in files:
        if source.path.stem not in SHARED_MODULE_NAMES:
            places[f"{source.path.parts[0]}/{source.path.stem}"].append(str(source.path))
    return {name: paths for name, paths in sorted(places.items()) if len(paths) > 1}


def long_test_names(files: Sequence[Source]) -> list[str]:
    """Return the names of tests that are longer than MAX_TEST_NAME characters."""
    return [name for source in files for name in _TEST.findall(source.text) if len(name) > MAX_TEST_NAME]


def hand_written(text: str) -> str:
    """Return a document without its generated tables."""
    return _GENERATED.sub("", text)


def long_cells(text: str) -> list[str]:
    """Return the table cells of a document that are longer than MAX_CELL characters."""
    rows = (line for line in text.splitlines() if line.lstrip().startswith("|"))
    cells = (cell.strip() for row in rows for cell in _CELL.split(row))
    return [cell for cell in cells if len(cell) > MAX_CELL]


def ruff_violations(root: Path) -> list[str]:
    """Return the code of each violation of ruff's rules of docstrings in the product."""
    folders = [name for name in PRODUCT if (root / name).is_dir()]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--exit-zero", "--output-format=json"]
    options = [*RUFF_RULES, "--exclude=pb", *folders]
    answer = subprocess.run([*command, *options], cwd=root, check=True, capture_output=True, text=True).stdout
    return [violation["code"] for violation in json.loads(answer)]


def way(root: Path) -> dict[str, Any]:
    """Return what benchmarks/way.py finds, with the `attune` of `root`."""
    environment = {**os.environ, "PYTHONPATH": f"{root / '.package'}{os.pathsep}{root}"}
    command = [sys.executable, str(ROOT / "benchmarks" / "way.py"), str(root)]
    answer = subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(answer))


@dataclass(frozen=True)
class Row:
    """One number of the table.

    Attributes:
        what: What is counted.
        now: The number.
        before: The same number at commit 82b576c.
        target: The largest number that is fine; None: there is no target.
    """

    what: str
    now: float
    before: float
    target: float | None = None

    @property
    def verdict(self) -> str:
        """Whether the target is met, in a word."""
        return "" if self.target is None else "yes" if self.now <= self.target else "no"


def rows(root: Path, walked: dict[str, Any]) -> Iterator[Row]:
    """Yield all numbers. `walked` is what `way` returns."""
    product = sources(root)
    spine = [source for source in product if source.path.parts[0] in SPINE]
    verbs = read_verbs(ROOT / VERBS)
    documents = {path: (root / path).read_text(encoding="utf-8") for path in listed(root, "*.md") if path.parts[0] != "tests"}
    words = {str(path): len(hand_written(text).split()) for path, text in documents.items()}
    violations = ruff_violations(root)
    lengths = [(node.end_lineno or node.lineno) - node.lineno + 1 for source in product for node in source.functions()]
    yield Row("code lines", sum(source.code_lines for source in product), 28134, 27500)
    yield Row("code lines of the spine", sum(source.code_lines for source in spine), 26690, 24000)
    yield Row("all lines", sum(source.lines for source in product), 41036)
    yield Row("files", len(product), 469, 415)
    yield Row(f"files over {MAX_FILE_LINES} lines", sum(source.lines > MAX_FILE_LINES for source in product), 0, 0)
    yield Row("median length of a function", statistics.median(lengths), 5, 9)
    yield Row("files on the way of an update", len(walked["handing_on"]), 61, 45)
    yield Row("... and leaves that they call", len(walked["leaves"]), 42)
    yield Row("docstrings against ruff's D401", violations.count("D401"), 775, 0)
    yield Row("violations of ruff's D rules", len(violations), 979, 0)
    yield Row("docstrings with a bad first word", sum(len(bad_first_words(source, verbs)) for source in product), 1883, 0)
    yield Row("class names that another class or alias has", len(duplicate_classes(product)), 61, 0)
    yield Row("module names twice in a package", len(duplicate_modules(product)), 19, 0)
    yield Row(f"variables called {', '.join(VAGUE)}", sum(len(vague_variables(source)) for source in product), 483, 0)
    yield Row(f"test names over {MAX_TEST_NAME} characters", len(long_test_names(sources(root, ["tests"]))), 44, 0)
    yield Row("words of all documents", sum(words.values()), 91431, 60000)
    yield Row("words of README.md", words.get("README.md", 0), 1830, 1500)
    yield Row("words of ARCHITECTURE.md", words.get("ARCHITECTURE.md", 0), 4392, 1800)
    yield Row(f"table cells over {MAX_CELL} characters", sum(len(long_cells(text)) for text in documents.values()), 83, 0)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--files", is_flag=True, help="Also print the files on the way of an update.")
@click.option("--root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=ROOT, help="Another checkout.")
def main(as_json: bool, files: bool, root: Path) -> None:
    """Print how large and how readable the repository is, beside commit 82b576c and the targets."""
    walked = way(root.resolve())
    table = list(rows(root.resolve(), walked))
    if as_json:
        click.echo(json.dumps({row.what: row.now for row in table} | ({"way": walked} if files else {}), indent=1))
        return
    click.echo(f"{'':<42}{'82b576c':>9}{'now':>9}{'at most':>9}  met")
    for row in table:
        target = "" if row.target is None else f"{row.target:,g}"
        click.echo(f"{row.what:<42}{row.before:>9,g}{row.now:>9,g}{target:>9}  {row.verdict}".rstrip())
    if files:
        click.echo("\n".join(["", "Files on the way of an update, which hand work on:", *walked["handing_on"]]))
        click.echo("\n".join(["", "Leaves, which these call:", *walked["leaves"]]))


if __name__ == "__main__":
    main()
