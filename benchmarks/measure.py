"""How large and how readable this repository is, in numbers: `make measure` fails if one is above its limit in limits.toml.

How things are counted:

- The product is every Python file outside tests, benchmarks, docs and examples, without generated code (`pb/`). The spine is
  common, fedserver and fedclient.
- A code line is a line with anything on it but blanks, a comment or a docstring. All lines of other multi-line strings count.
- A function's length is its lines from `def` (without decorators) to its end, as they stand in the file.
- Attributes of a class are the names that its methods assign to `self.NAME`. Parameters do not include self and cls.
- A file names a feature if one of the feature's words stands in its code: in a name or a string, but not in a docstring.
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
import msgspec

ROOT = Path(__file__).resolve().parents[1]
SPINE = ("common", "fedserver", "fedclient")
BESIDE = ("tests", "benchmarks", "docs", "examples")
LIMITS = ROOT / "benchmarks" / "limits.toml"
MAX_FILE_LINES, MAX_CELL, MAX_TEST_NAME = 400, 200, 80
SHARED_MODULE_NAMES = (
    "__init__",
    "base",
    "registry",
    *("feature", "settings", "rules", "server", "lab", "device", "work", "shown"),
)
VERBS = "tests/docs/verbs.txt"
# The first words that no docstring of a class, a module or a property may have. "Whether" is fine for a property.
NO_FIRST_WORDS = frozenset(
    ("Of", "As", "By", "Who", "Whose", "Whom", "What", "Where", "Whether", "Here", "There", "Nobody", "Nothing", "Maybe")
)
THIRD_PERSON = frozenset(("Carries", "Finds", "Gives", "Holds", "Issues", "Keeps", "Makes", "Owns", "Reads", "Sends", "Trains"))
VAGUE = ("found", "each", "own", "told")
RUFF_RULES = ("--select=D,D401", "--ignore=D102,D105,D107", "--config=lint.pydocstyle.convention='google'")
FREE_SIGNATURES = ("simulate", "Client.__init__")  # their parameters are the public interface
# Prints how many modules the help of the server imports.
HELP = """
import sys
from contextlib import suppress
from attune.fedserver.cli import main
sys.argv = ["fedserver", "--help"]
with suppress(SystemExit):
    main()
print(sum(name == "attune" or name.startswith("attune.") for name in sys.modules))
"""
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

    @cached_property
    def code(self) -> str:
        """Names, strings and numbers with blanks between them, without comments and docstrings."""
        starts = {node.body[0].lineno for node in self.documented()}
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return " ".join(token.string for token in tokens if token.type not in _NO_CODE and token.start[0] not in starts)

    @property
    def most_attributes(self) -> int:
        """Number of attributes of the class that has most."""
        classes = (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))
        return max((len(set(_assigned_to_self(node))) for node in classes), default=0)

    @property
    def most_parameters(self) -> int:
        """Number of parameters of the function that has most, without FREE_SIGNATURES."""
        classes = (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))
        free = {
            member
            for node in classes
            for member in node.body
            if f"{node.name}.{getattr(member, 'name', '')}" in FREE_SIGNATURES
        }
        return max(
            (_parameters(node) for node in self.functions() if node not in free and node.name not in FREE_SIGNATURES), default=0
        )

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


def _assigned_to_self(node: ast.AST) -> Iterator[str]:
    for place in ast.walk(node):
        if isinstance(place, ast.Attribute) and isinstance(place.ctx, ast.Store) and ast.unparse(place.value) == "self":
            yield place.attr


def _parameters(node: Function) -> int:
    parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return sum(parameter.arg not in ("self", "cls") for parameter in parameters)


def listed(root: Path, pattern: str) -> list[Path]:
    """Return the files that git knows or would add, relative to `root`, sorted."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", pattern]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    return [Path(name) for name in sorted({*names} - {""}) if (root / name).is_file()]


def sources(root: Path, packages: Sequence[str] = ()) -> list[Source]:
    """Return the Python files of some top-level folders, without generated code; by default those of the product."""
    paths = [path for path in listed(root, "*.py") if "pb" not in path.parts]
    chosen = [path for path in paths if (path.parts[0] in packages if packages else path.parts[0] not in BESIDE)]
    return [Source(path, (root / path).read_text(encoding="utf-8")) for path in chosen]


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


def naming(files: Sequence[Source], words: str, own: str) -> list[str]:
    """Return the files that name a feature and are none of its own; `words` and `own` are regular expressions."""
    named, theirs = re.compile(words, re.IGNORECASE), re.compile(own)
    return [str(source.path) for source in files if named.search(source.code) and not theirs.search(str(source.path))]


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
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--exit-zero", "--output-format=json"]
    options = [*RUFF_RULES, f"--exclude={','.join(('pb', *BESIDE))}", "."]
    answer = subprocess.run([*command, *options], cwd=root, check=True, capture_output=True, text=True).stdout
    return [violation["code"] for violation in json.loads(answer)]


def printed(root: Path, *words: str) -> str:
    """Return what Python prints with the `attune` of `root`."""
    environment = {**os.environ, "PYTHONPATH": f"{root / '.package'}{os.pathsep}{root}"}
    return subprocess.run(
        [sys.executable, *words], cwd=root, env=environment, check=True, capture_output=True, text=True
    ).stdout


def read_limits() -> dict[str, Any]:
    """Return "limits", the largest value of each number, and "features", words and own files of each feature."""
    return dict(msgspec.toml.decode(LIMITS.read_bytes()))


def numbers(root: Path, walked: dict[str, Any], features: dict[str, dict[str, str]]) -> Iterator[float]:
    """Yield all numbers in the order of limits.toml.

    Args:
        root: The checkout.
        walked: What benchmarks/way.py prints.
        features: Words and own files of each feature.
    """
    product, tests = sources(root), sources(root, ["tests"])
    verbs = read_verbs(ROOT / VERBS)
    documents = {path: (root / path).read_text(encoding="utf-8") for path in listed(root, "*.md") if path.parts[0] != "tests"}
    words = {str(path): len(hand_written(text).split()) for path, text in documents.items()}
    yield sum(source.code_lines for source in product)
    yield sum(source.code_lines for source in product if source.path.parts[0] in SPINE)
    yield sum(source.code_lines for source in tests)
    yield len(product)
    yield sum(source.lines > MAX_FILE_LINES for source in product)
    yield statistics.median((node.end_lineno or node.lineno) - node.lineno + 1 for one in product for node in one.functions())
    yield len(walked["handing_on"])
    yield len(walked["handing_on"]) + len(walked["leaves"])
    yield max(source.most_attributes for source in product)
    yield max(source.most_parameters for source in product)
    yield int(printed(root, "-c", HELP).split()[-1])
    for feature in features.values():
        yield len(naming(product, **feature))
    yield len(ruff_violations(root))
    yield sum(len(bad_first_words(source, verbs)) for source in product)
    yield len(duplicate_classes(product))
    yield len(duplicate_modules(product))
    yield sum(len(vague_variables(source)) for source in product)
    yield len(long_test_names(tests))
    yield sum(words.values())
    yield words["README.md"]
    yield words["ARCHITECTURE.md"]
    yield sum(len(long_cells(text)) for text in documents.values())


@click.command()
@click.option("--lower", is_flag=True, help="Write lower limits where a number is below its limit.")
@click.option("--files", is_flag=True, help="Also print the files on the way of an update, and those that name a feature.")
@click.option("--root", type=click.Path(exists=True, file_okay=False, path_type=Path), default=ROOT, help="Another checkout.")
def main(lower: bool, files: bool, root: Path) -> None:
    """Print how large and how readable the repository is, beside the limits. Exit status 1: a number is above its limit."""
    root = root.resolve()
    walked = json.loads(printed(root, str(ROOT / "benchmarks" / "way.py"), str(root)))
    committed, above = read_limits(), 0
    text = LIMITS.read_text(encoding="utf-8")
    for (what, limit), now in zip(committed["limits"].items(), numbers(root, walked, committed["features"]), strict=True):
        above += now > limit
        click.echo(f"{what:<70}{now:>9,g}{limit:>9,g}{'  TOO MUCH' * (now > limit)}")
        if lower and now < limit:
            text = text.replace(f'"{what}" = {limit}\n', f'"{what}" = {now:g}\n')
    if lower:
        LIMITS.write_text(text, encoding="utf-8")
    if files:
        click.echo("\n".join(["", "Files on the way of an update, which hand work on:", *walked["handing_on"]]))
        click.echo("\n".join(["", "Leaves, which these call:", *walked["leaves"]]))
        for what, feature in committed["features"].items():
            click.echo("\n".join(["", f"{what}:", *naming(sources(root), **feature)]))
    if above:
        raise SystemExit(f"numbers above their limits in {LIMITS.relative_to(ROOT)}: {above}; make them smaller")


if __name__ == "__main__":
    main()
