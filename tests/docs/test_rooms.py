"""Folders: both sides read `common`, and the server's decisions know no paths."""

import ast
import re
import subprocess
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attune.common import plugins
from attune.common.methods import registry
from attune.common.methods.method import assign
from attune.common.models.registry import build, default_spec

ROOT = Path(__file__).parents[2]
SIDES = ("fedserver", "fedclient")


def modules() -> dict[str, Path]:
    found = {}
    for top in ("common", *SIDES, "features"):
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


FEATURES_OF = {"fedclient": ("attune.features.finished.",)}  # whose commands a side has, apart from that on the server


def reached(side: str) -> set[str]:
    """Return the modules that a side imports, directly or not, with those of its features' commands.

    Methods are imported by name, so all of them are included.
    """
    graph = defaultdict(set, {name: imports_of(path) for name, path in MODULES.items()})
    graph["attune.common.methods.registry"] |= {name for name in MODULES if name.startswith("attune.common.methods.")}
    waiting = [name for name in MODULES if name.startswith((f"attune.{side}", *FEATURES_OF.get(side, ())))]
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


# --- the examples of CONTRIBUTING.md, executed, and its targets against the Makefile

PAGE = "CONTRIBUTING.md"


@pytest.fixture
def example(page: Any) -> Any:
    """Return the code block whose first line is `# PATH`."""
    found = {block.split("\n", 1)[0].removeprefix("# "): block for block in page(PAGE).blocks("python")}
    return found.__getitem__


def execute(name: str, code: str) -> types.ModuleType:
    module = types.ModuleType(name)
    exec(compile(code, name, "exec"), module.__dict__)  # noqa: S102 (our own document)
    return module


def test_the_method_is_found_and_only_its_head_travels(example: Any, page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = execute("lg_fedavg", example("lg_fedavg.py"))
    line = re.search(r'`attune.register\("(\w+)", "([\w-]+)", (\w+)\)`', page(PAGE).text)
    assert line is not None
    monkeypatch.setitem(plugins._registered[line[1]], line[2], getattr(module, line[3]))
    assert registry.get("lg-fedavg") is module.LG_FEDAVG
    parts = assign(registry.get("lg-fedavg"), build(default_spec("tabular", (4,), 3, 0, "dnn", {}), seed=0))
    assert {name for name, part in parts.items() if part == "shared"} == {"head.weight", "head.bias"}
    assert set(parts.values()) == {"shared", "private"}


@pytest.fixture
def mymodels(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mymodels").mkdir()
    (tmp_path / "mymodels" / "tiny.py").write_text(example("mymodels/tiny.py"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("mymodels", "mymodels.tiny"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("mymodels")
def test_the_model_is_built_by_its_name() -> None:
    model = build(default_spec("images", (8, 8, 1), 10, 0, "mymodels.tiny:tiny", {"width": 8}), seed=0)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert sum(p.numel() for p in model.parameters()) == 64 * 8 + 8 + 8 * 10 + 10


def test_every_target_of_the_makefile_is_described(page: Any, root: Path) -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    described = [row[0].strip("`").removeprefix("make ") for row in page(PAGE).table("## Set-up")]
    assert sorted(described) == sorted(phony[1].split())


def test_what_commands_need_to_answer_at_once_imports_no_torch() -> None:
    """Check modules one after the other in one interpreter; `--help` and `status` also check settings and choose models."""
    light = [
        "common.identity.certificates",
        "common.identity.client_tls",
        "common.identity.credential",
        "common.identity.token",
    ]
    light += ["fedserver.identity.authority", "fedserver.identity.registrar", "fedserver.identity.server_tls"]
    light += ["fedclient.link.diagnose", "fedserver.stores.uploads", "common.wire.blobs", "common.methods", "common.models"]
    code = """
import importlib, sys, attune
assert "simulate" in dir(attune)
for name in sys.argv[1:]:
    importlib.import_module(f"attune.{name}")
    assert "torch" not in sys.modules, name
from attune.common.methods import method, registry
from attune.common.models import registry as models
configured = [method.configure(registry.get(name), {}) for name in registry.names()]
models.default_spec("images", (8, 8, 1), 2, 0, None, {})
assert "torch" not in sys.modules and configured and models.names()
"""
    done = subprocess.run([sys.executable, "-c", code, *light], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_ci_runs_every_suite_that_make_test_leaves_out(page: Any, root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    [folders] = re.findall(r"^LEFT_OUT := (.*)$", makefile, re.MULTILINE)
    [marked] = re.findall(
        r"^test: .*\n\t.* -m 'not (\w+(?: and not \w+)*)' \$\(LEFT_OUT:%=--ignore=tests/%\)$", makefile, re.MULTILINE
    )
    targets = re.findall(r"^make (\S+)", (root / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    suites = [*folders.split(), *marked.split(" and not ")]
    assert [name for name in suites if not any(name in target.split("-") for target in targets)] == []
    [said] = re.findall(r"^CI runs `.ci/run`: (.*)$", page(PAGE).section("## Set-up"), re.MULTILINE)
    assert re.findall(r"`([\w-]+)`", said) == targets


def test_files_that_start_engines_have_the_marker(root: Path) -> None:
    """Keep engines out of `make test`: a file that uses them marks its tests, or the parameters that need one."""
    texts = {path: path.read_text(encoding="utf-8") for path in (root / "tests").rglob("test_*.py")}
    using = {
        path
        for path, text in texts.items()
        if re.search(r"^from tests(\.engines)? import (?:.*, )?engines\b", text, re.MULTILINE)
    }
    assert len(using) > 5
    assert {path for path in using if "mark.engines" not in texts[path]} == set()


def test_areas_of_tests_that_are_named_exist(page: Any, root: Path) -> None:
    areas = {path.parent.name for path in (root / "tests").glob("*/test_*.py")}
    named = set(re.findall(r"`tests/(\w+)`", page(PAGE).section("## Where things go")))
    assert len(named) >= 8
    assert named <= areas


@pytest.mark.parametrize("package", ["common", "features", "fedserver", "fedclient", "simulation", "contrib"])
def test_folders_of_tests_mirror_the_product(package: str, root: Path) -> None:
    folders = {path.parent.relative_to(root / "tests") for path in (root / "tests" / package).rglob("test_*.py")}
    assert folders
    assert {folder for folder in folders if not (root / folder / "__init__.py").is_file()} == set()


def test_every_slow_test_is_a_function_of_its_file(root: Path) -> None:
    lines = (root / "tests" / "slow.txt").read_text(encoding="utf-8").splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        file, function = line.split("::")
        assert re.search(rf"^(async )?def {function}\(", (root / file).read_text(encoding="utf-8"), re.MULTILINE), line
