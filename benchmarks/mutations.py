"""Seeded faults: a mutation in each of many functions of the product, and the test that finds it.

A mutation is a changed comparison, constant or sign, a dropped call, or a negated condition, on one line. One at a time is made
in a clone of this repository at HEAD. Then tests run until one fails: those of the folder that mirrors the file's, first those
that name the module; then those of other folders that name it; then those of both that need engines (PostgreSQL,
browsers). A test counts only if it passes without the mutation.

`--again` makes the mutations of an earlier result file once more, if their lines are still there: a function may have moved to
another file. So the same faults can be tried after a large change.
"""

from __future__ import annotations

import ast
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import ROOT, Function, Source, sources
from benchmarks.result_file import Results

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
    ast.Add: ast.Sub,
}
SWAPPED |= {value: key for key, value in SWAPPED.items()}
LIMIT_S, TEST_LIMIT_S = 400, 120


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        file: Relative to the repository's root.
        function: Its name with those of the classes and functions around it, such as "Policy.draw".
        kind: "comparison", "constant", "sign", "call" or "condition".
        before: The line, without blanks around it.
        after: The line with the fault.
    """

    file: str
    function: str
    kind: str
    before: str
    after: str

    def place(self, files: Sequence[Source]) -> tuple[Source, int] | None:
        """Return the file and the index of the line to change; None: the function or the line is no longer there."""
        for source in sorted(files, key=lambda source: str(source.path) != self.file):
            lines = source.text.splitlines()
            for name, node in functions(source.tree):
                inside = range(node.lineno - 1, node.end_lineno or node.lineno)
                places = [index for index in inside if lines[index].strip() == self.before] if name == self.function else []
                if places:
                    return source, places[0]
        return None


def functions(tree: ast.AST, around: str = "") -> Iterator[tuple[str, Function]]:
    """Yield functions and methods with their names; a function within another belongs to the outer one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield around + node.name, node
        else:
            yield from functions(node, f"{around}{node.name}." if isinstance(node, ast.ClassDef) else around)


def mutated(node: ast.AST) -> tuple[str, ast.expr | ast.stmt, str] | None:
    """Return the kind of fault that a node can have, the node to replace, and the code to replace it with."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            swapped = ast.Compare(node.left, [SWAPPED[type(operator)]()], node.comparators)  # type: ignore[list-item]
            return "comparison", node, ast.unparse(swapped)
        case ast.Constant(value=bool() | int() | float() as value):
            return "constant", node, str(not value if isinstance(value, bool) else value + 1)
        case ast.BinOp(op=ast.Add() | ast.Sub()):
            return "sign", node, ast.unparse(ast.BinOp(node.left, SWAPPED[type(node.op)](), node.right))  # type: ignore[arg-type]
        case ast.UnaryOp(op=ast.USub()):
            return "sign", node, f"({ast.unparse(node.operand)})"
        case ast.Expr(value=ast.Call() | ast.Await()):
            return "call", node, "pass"
        case ast.If() | ast.IfExp():
            return "condition", node.test, f"not ({ast.unparse(node.test)})"
    return None


def faults(function: Function, lines: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield kind, line before and line after for each fault that a function can have on a line that it has once."""
    waiting: list[ast.AST] = [*function.body]
    stripped = [line.strip() for line in lines[function.lineno - 1 : function.end_lineno]]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.JoinedStr | ast.arguments):
            continue
        waiting += [child for name, child in _children(node) if name not in ("annotation", "returns")]
        fault = mutated(node)
        if fault is None:
            continue
        kind, old, code = fault
        if old.lineno != old.end_lineno:
            continue
        line = lines[old.lineno - 1].encode()
        after = line[: old.col_offset] + code.encode() + line[old.end_col_offset :]
        if stripped.count(line.decode().strip()) == 1:
            yield kind, line.decode().strip(), after.decode().strip()


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield name, child


def drawn(files: Sequence[Source], count: int, seed: int) -> list[Mutation]:
    """Return `count` mutations, each in another function; kinds that a function can have are equally likely."""
    rng = random.Random(seed)  # noqa: S311
    candidates = []
    for source in files:
        lines = source.text.splitlines()
        for name, node in functions(source.tree):
            if possible := sorted(set(faults(node, lines))):
                candidates.append((str(source.path), name, possible))
    mutations = []
    for file, name, possible in rng.sample(candidates, count):
        kind = rng.choice(sorted({kind for kind, _, _ in possible}))
        mutations.append(Mutation(file, name, *rng.choice([fault for fault in possible if fault[0] == kind])))
    return mutations


def folder_of_tests(root: Path, file: str) -> Path:
    """Return the folder of tests that mirrors the file's, or the next one above it that has tests."""
    folder = root / "tests" / Path(file).parent
    while not any(folder.glob("test_*.py")):
        folder = folder.parent
    return folder


def stages(root: Path, file: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the tests to run, each time with the name of the stage: the arguments of pytest."""
    path = Path(file)
    package = re.escape(".".join(("attune", *path.parent.parts)))
    names = re.compile(rf"{package}(\.{path.stem}\b| import [^\n]*\b{path.stem}\b)")
    near = sorted(folder_of_tests(root, file).glob("test_*.py"))
    named = [test for test in sorted((root / "tests").rglob("test_*.py")) if names.search(test.read_text(encoding="utf-8"))]
    near.sort(key=lambda test: (path.stem not in test.stem, test not in named))
    far = [test for test in named if test not in near]
    yield "folder", ["-m", "not engines", *map(str, near)]
    if far:
        yield "elsewhere", ["-m", "not engines", *map(str, far)]
    if engines := [test for test in near + far if "mark.engines" in test.read_text(encoding="utf-8")]:
        yield "engines", ["-m", "engines", *map(str, engines)]


def first_failure(root: Path, tests: Sequence[str]) -> str:
    """Return the test that fails first; empty: none fails within LIMIT_S.

    Raises:
        subprocess.TimeoutExpired: The tests take longer.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": f"{root / '.package'}{os.pathsep}{root}"}
    options: dict[str, Any] = {"cwd": root, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*command, f"--timeout={TEST_LIMIT_S}", *tests], text=True, start_new_session=True, **options)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with the servers that a test has started
    match = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    return match[1] if match else "" if process.returncode in (0, 5) else f"pytest ends with {process.returncode}"


class Tree:
    """A clone in which faults are made.

    Attributes:
        root: Its folder.
        unsound: Tests that fail without a fault, too.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.unsound: set[str] = set()
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(root)], check=True)
        metadata = [sys.executable, "-c", "from setuptools import setup; setup()", "-q", "egg_info"]
        subprocess.run(metadata, cwd=root, check=True, stdout=subprocess.DEVNULL)

    def write(self, file: Path, text: str) -> None:
        """Write a file of the product, and forget its compiled form, which may have the same size and second."""
        (self.root / file).write_text(text, encoding="utf-8")
        for compiled in (self.root / file).parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()

    def try_out(self, mutation: Mutation, source: Source, index: int) -> tuple[str, str]:
        """Make a fault and run tests; return the test that finds it (empty: none) and its stage, or those too long."""
        lines = source.text.splitlines(keepends=True)
        lines[index] = lines[index].replace(mutation.before, mutation.after)
        too_long = []
        for where, tests in stages(self.root, str(source.path)):
            try:
                test = self._finder(tests, source, "".join(lines))
            except subprocess.TimeoutExpired:
                too_long.append(f"{where}: more than {LIMIT_S} s")
                continue
            if test:
                return test, where
        return "", "; ".join(too_long)

    def _finder(self, tests: Sequence[str], source: Source, fault: str) -> str:
        """Return the first test that fails with the text `fault` in a file and passes without; empty: there is none."""
        while True:
            self.write(source.path, fault)
            try:
                test = first_failure(self.root, [*tests, *(f"--deselect={name}" for name in self.unsound)])
            finally:
                self.write(source.path, source.text)
            if "::" not in test or not first_failure(self.root, [test]):
                return test
            self.unsound.add(test)


@click.command()
@click.option("--seed", default=54, show_default=True)
@click.option("--count", default=60, show_default=True, help="Number of mutations.")
@click.option("--again", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Make those of this result file.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="CSV file of results.")
def main(seed: int, count: int, again: Path | None, out: Path) -> None:
    """Make faults, one at a time, and write which test finds each. Those that are in the file already are done."""
    results = Results(out, [*Mutation.__dataclass_fields__, "found_by", "where", "seconds"])
    names = list(Mutation.__dataclass_fields__)
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder) / "attune")
        files = sources(tree.root)
        mutations = drawn(files, count, seed)
        if again:
            mutations = [Mutation(*(row[name] for name in names)) for row in Results(again, names).rows()]
        done = [Mutation(*(row[name] for name in names)) for row in results.rows()]
        for mutation in mutations:
            place, began = mutation.place(files), time.monotonic()
            if mutation in done:
                continue
            found_by, where = tree.try_out(mutation, *place) if place else ("the line is gone", "")
            results.add([asdict(mutation) | {"found_by": found_by, "where": where, "seconds": round(time.monotonic() - began)}])
            click.echo(f"{mutation.file} {mutation.function}: {found_by or 'NOT FOUND'}")


if __name__ == "__main__":
    main()
