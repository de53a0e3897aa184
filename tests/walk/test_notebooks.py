"""The notebooks run from the first cell to the last, and their results can be shown."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def shown_by(name: str) -> tuple[dict[str, Any], list[str]]:
    """Run cells as a notebook does, in one namespace. Return the names after the last cell, and each cell's final text."""
    space: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for cell in json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert not cell["outputs"], "outputs are not committed: they would be those of one machine"
        tree = ast.parse("".join(cell["source"]), name)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), space)  # noqa: S102 - our own file
        if isinstance(last, ast.Expr):
            shown.append(repr(eval(compile(ast.Expression(last.value), name, "eval"), space)))  # noqa: S307
    return space, shown


def test_first_steps() -> None:
    space, shown = shown_by("first_steps.ipynb")
    tables = [text for text in shown if text.startswith("device ")]
    assert len(tables) == 2
    assert all(space[name].table().mean("personalized") > 0.75 for name in ("result", "own")), "four digits: chance is 0.25"


def test_does_it_help(capsys: pytest.CaptureFixture[str]) -> None:
    space, _ = shown_by("does_it_help.ipynb")
    assert {method: sum(found.values()) for method, found in space["verdicts"].items()} == {"fedavg": 6, "fedper": 6}
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["device", "alone", "fedavg", "fedper"]
    assert lines[-2].startswith("fedavg: from ")
