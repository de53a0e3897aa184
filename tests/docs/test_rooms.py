"""Folders: both sides read `common`, and the server's decisions know no paths."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIDES = ("fedserver", "fedclient")


def modules() -> dict[str, Path]:
    found = {}
    for top in ("common", *SIDES):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[f"attune.{name.removesuffix('.__init__')}"] = path
    return found


MODULES = modules()


def imports_of(path: Path) -> set[str]:
    """Return the project's modules that a file imports, or names in a string for a later import ("module:attribute")."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.partition(":")[0])
    return found & MODULES.keys()


def reached(side: str) -> set[str]:
    """Return the modules that a side imports, directly or not. Methods are imported by name, so all of them are included."""
    graph = defaultdict(set, {name: imports_of(path) for name, path in MODULES.items()})
    graph["attune.common.methods.registry"] |= {name for name in MODULES if name.startswith("attune.common.methods.")}
    waiting = [name for name in MODULES if name.startswith(f"attune.{side}")]
    seen: set[str] = set()
    while waiting:
        for name in graph[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def test_no_file_lies_in_common_that_one_side_alone_reads() -> None:
    shared = {name for name, path in MODULES.items() if name.startswith("attune.common.") and path.name != "__init__.py"}
    shared -= {name for name in shared if name.startswith("attune.common.pb.")}  # generated; the stubs serve other peers
    readers = {side: reached(side) for side in SIDES}
    assert {name: [side for side in SIDES if name in readers[side]] for name in shared} == {name: [*SIDES] for name in shared}


@pytest.mark.parametrize("room", ["core", "lab", "federation"])
def test_decisions_and_tensors_know_no_paths(room: str) -> None:
    """Require that state is reached through the ports; only the stores know where it lies."""
    knowing = [
        path.name
        for path in (ROOT / "fedserver" / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.ImportFrom) and node.module in ("pathlib", "sqlite3", "os.path"))
        or (isinstance(node, ast.Import) and {alias.name for alias in node.names} & {"pathlib", "sqlite3"})
    ]
    assert knowing == []
