"""Mutations of functions made by hand, and which test finds one in a tree made by hand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks import mutations
from benchmarks.measure import Source
from benchmarks.mutations import Mutation

MODULE = """
class Policy:
    def late(self, age: int) -> bool:
        self.note()
        if age < -2:
            return f"{age + 1}"
        return not age
        return not age
"""
MORE = Mutation("common/policy.py", "Policy.late", "comparison", "if age < -2:", "if age <= -2:")


def test_each_place_of_a_function_has_its_fault() -> None:
    [(name, node)] = mutations.functions(ast.parse(MODULE))
    assert name == "Policy.late"
    assert sorted(mutations.faults(node, MODULE.splitlines())) == [
        ("call", "self.note()", "pass"),
        ("comparison", "if age < -2:", "if age <= -2:"),
        ("condition", "if age < -2:", "if not (age < -2):"),
        ("constant", "if age < -2:", "if age < -3:"),
        ("sign", "if age < -2:", "if age < (2):"),
    ]


def test_the_same_seed_draws_the_same_faults_and_one_for_each_function() -> None:
    files = [Source(Path(f"common/{name}.py"), MODULE) for name in "abc"]
    first, again = mutations.drawn(files, 3, 1), mutations.drawn(files, 3, 1)
    assert first == again
    assert sorted(mutation.file for mutation in first) == ["common/a.py", "common/b.py", "common/c.py"]


def test_a_function_is_found_where_it_has_moved_to_and_a_line_that_is_gone_is_not() -> None:
    moved = Source(Path("common/rules.py"), "# moved\n" + MODULE)
    assert MORE.place([Source(Path("common/policy.py"), ""), moved]) == (moved, 5)
    assert MORE.place([Source(Path("common/policy.py"), MODULE.replace("-2", "-3"))]) is None


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> mutations.Tree:
    """Return a tree with one function and two tests, of which the first always fails."""
    made = mutations.Tree.__new__(mutations.Tree)
    made.root, made.unsound = tmp_path, set()
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "rules.py").write_text("def bigger(a, b):\n    return a > b\n", encoding="utf-8")
    (tmp_path / "tests" / "common").mkdir(parents=True)
    (tmp_path / "tests" / "common" / "test_rules.py").write_text(
        "from common.rules import bigger\n\ndef test_red(): assert False\n\ndef test_two(): assert not bigger(2, 2)\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(mutations, "TEST_LIMIT_S", 60)
    return made


def test_the_test_that_finds_a_fault_is_named_and_a_red_one_does_not_count(tree: mutations.Tree) -> None:
    source = Source(Path("common/rules.py"), (tree.root / "common" / "rules.py").read_text(encoding="utf-8"))
    seen = Mutation("common/rules.py", "bigger", "comparison", "return a > b", "return a >= b")
    missed = Mutation("common/rules.py", "bigger", "sign", "return a > b", "return a - b > 0")
    assert tree.try_out(seen, source, 1) == ("tests/common/test_rules.py::test_two", "folder")
    assert tree.try_out(missed, source, 1) == ("", "")
    assert tree.unsound == {"tests/common/test_rules.py::test_red"}
    assert (tree.root / "common" / "rules.py").read_text(encoding="utf-8") == source.text
