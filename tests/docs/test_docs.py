"""Every document: links, files, commands and flags exist; tables have a row for all that there is."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest
from click.testing import CliRunner

from attune.common.metrics import METRICS
from attune.fedclient.cli import main as fedclient
from attune.fedserver.cli import cli as fedserver
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.records import DeviceRecord
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.export import ORDER_COLUMNS
from attune.fedserver.view.status import status
from attune.simulation.partition import datasets as readers
from attune.simulation.partition import samples
from attune.simulation.partition.schemes import registry
from benchmarks import idea, measure
from docs.components import components

ROOT = Path(__file__).parents[2]
COMMANDS: dict[str, click.Group] = {"fedserver": fedserver, "fedclient": fedclient}
SHOWN = re.compile(r"(?:^|(?<=`))((?:fedserver|fedclient)(?: [^`\n]*)?)(?=`|$)", re.MULTILINE)
FLAG = re.compile(r"`(--[a-z][a-z-]*)")
NAMED = re.compile(
    r"`((?:common|fedserver|fedclient|simulation|contrib|tests|proto|benchmarks|docs|deploy|examples|\.ci)/[\w./+-]*)`"
)


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    return [path for path in listed or [str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")] if (ROOT / path).exists()]


PAGES = sorted({*tracked(), "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"})


def shown_commands(text: str) -> Iterator[list[str]]:
    """Return the words of every shown command line, in a block or in code within the prose, without comments."""
    for line in SHOWN.findall(text.replace("\\\n", " ")):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        if all(re.fullmatch(r"[\w.:/=,@|\[\]+*~$<>{}-]+", word) for word in words):
            yield words


@pytest.mark.parametrize("path", PAGES)
def test_links_resolve(path: str, page: Any) -> None:
    broken = []
    for link in page(path).links():
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / path).parent / name if name else ROOT / path
        if not target.exists() or (anchor and anchor not in page(str(target.resolve().relative_to(ROOT))).anchors()):
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("path", PAGES)
def test_commands_and_flags_exist(path: str, page: Any) -> None:
    known, removed = known_flags(), re.compile(r"^### Removed$.*?(?=^##)", re.MULTILINE | re.DOTALL)
    for words in shown_commands(removed.sub("", page(path).text)):
        name, rest = words[0], words[1:]
        while rest and f"{name} {rest[0]}" in known:
            name = f"{name} {rest.pop(0)}"
        unknown = {word.partition("=")[0] for word in rest if word.startswith("--")} - known[name]
        assert not unknown, f"{' '.join(words)}: {unknown}"


OPERATIONS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs" / "operations").glob("*.md"))]


@pytest.mark.parametrize(
    "path", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/data.md", "docs/protocol.md", "docs/security.md", *OPERATIONS]
)
def test_flags_named_in_prose_exist(path: str, page: Any) -> None:
    assert set(FLAG.findall(page(path).prose)) <= set().union(*known_flags().values())


@pytest.mark.parametrize("path", PAGES)
def test_commands_that_name_a_module_of_the_examples_say_how_it_is_found(path: str, page: Any) -> None:
    blocks = [block for block in page(path).blocks("") if "--model examples." in block]
    assert all("export PYTHONPATH=" in block for block in blocks)


def every_command() -> Iterator[tuple[str, click.Command]]:
    for name, group in COMMANDS.items():
        yield from with_commands(name, group)


def with_commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and, if it is a group, the commands in it."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for word in command.list_commands(context):
            inner = command.get_command(context, word)
            assert inner is not None
            yield from with_commands(f"{name} {word}", inner)


@cache
def known_flags() -> dict[str, set[str]]:
    """Return the flags of each command, collected once: the list takes longer than to read a page."""
    return {name: flags(command) for name, command in every_command()}


def flags(command: click.Command) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts} | {"--help"}


def test_help_of_every_command_answers_and_each_is_documented(page: Any) -> None:
    text = "".join(page(path).text for path in PAGES)
    for name, command in every_command():
        result = CliRunner().invoke(command, ["--help"])
        assert result.exit_code == 0, name
        assert "\\b" not in result.output, name  # a mark that click did not read
        assert name in text


@pytest.mark.parametrize("path", PAGES)
def test_files_named_exist(path: str, page: Any) -> None:
    assert not [name for name in NAMED.findall(page(path).prose) if not (ROOT / name).exists()]


def test_every_decision_is_in_the_list(page: Any, root: Path) -> None:
    linked = {link for link in page("docs/decisions/README.md").links() if "/" not in link}
    assert linked == {path.name for path in (root / "docs" / "decisions").glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("what", ["README.md", "ARCHITECTURE.md", "all documents without generated tables"])
def test_documents_keep_their_limits_of_words(what: str, page: Any) -> None:
    pages = [path for path in PAGES if what == path or (what not in PAGES and not path.startswith("tests/"))]
    words = sum(len(measure.hand_written(page(path).text).split()) for path in pages)
    assert words <= measure.read_limits()["limits"][f"words of {what}"]


@pytest.mark.parametrize("path", PAGES)
def test_no_cell_of_a_table_is_long(path: str, page: Any) -> None:
    assert measure.long_cells(page(path).text) == []


def test_the_picture_is_drawn_by_its_script() -> None:
    assert idea.OUT.read_text(encoding="utf-8") == idea.svg()
    assert ElementTree.fromstring(idea.svg()).tag.endswith("svg")  # noqa: S314


def plain(cell: str) -> str:
    return "" if cell == "empty" else cell.strip("`")


def test_every_scheme_has_its_row_and_an_example(page: Any) -> None:
    rows = page("docs/data.md").table("## Schemes")
    assert sorted(plain(row[0]) for row in rows) == [*registry.SCHEMES]
    assert all(f"--scheme {plain(row[0])}" in row[3] for row in rows)


def test_every_setting_of_a_scheme_has_its_row_and_default(page: Any) -> None:
    said = {(plain(row[0]), plain(row[1])): plain(row[2]) for row in page("docs/data.md").table("## Settings of the schemes")}
    known = {
        (name, key): str(default) for name in registry.SCHEMES for key, default in registry.fields(registry.get(name)).items()
    }
    assert said == known


def test_every_reader_has_its_row(page: Any) -> None:
    rows = page("docs/data.md").table("## Files")
    forms = [row for row in rows if len(row) == 3]
    assert len(forms) == len(readers.BUILT_IN) + 1  # READERS and the digits
    assert all("fedclient partition" in row[2] for row in forms)


def test_every_normalisation_has_its_row(page: Any) -> None:
    rows = page("docs/data.md").table("## Normalisation and noise")
    assert {plain(name) for row in rows for name in row[0].split(", ")} == set(samples.HOWS)


def test_every_field_of_the_status_is_described(page: Any) -> None:
    monitoring = page("docs/operations/monitoring.md")
    record = Record(phase=Phase.TRAINING, devices=("anna",), cohort=("anna",), opened_at=5.0)
    said = status(Snapshot(None, None, record, (DeviceRecord("anna", "key"),), (), ()), set())
    rows = [row[0].strip("`") for row in monitoring.table("## Status")]
    [client] = said["clients"]
    assert METRICS.keys() <= client.keys()
    assert rows == [*said, *(field for field in client if field not in METRICS)]
    described = monitoring.section("## Status")
    for field in [*said["awaited"][0], "mean_over_clients", "over_samples"]:
        assert f"`{field}`" in described


def test_every_column_of_metrics_csv_is_described(page: Any) -> None:
    described = page("docs/operations/results.md").section("## Export")
    assert all(f"`{column}`" in described for column in ORDER_COLUMNS)
    assert "(../metrics.md)" in described


MATERIALS = components()
BY_NAME = {component["name"]: component for component in MATERIALS["components"]}


@pytest.mark.parametrize("name", ["torch", "grpcio", "cryptography", "starlette", "cffi"])
def test_needed_packages_have_version_and_licence(name: str) -> None:
    """Starlette is of an extra; cffi is needed by cryptography alone."""
    component = BY_NAME[name]
    assert component["version"] == version(name) and component["purl"] == f"pkg:pypi/{name}@{version(name)}"
    assert all(licence["license"]["name"] for licence in component["licenses"]) and component["licenses"]


def test_packages_of_developers_and_attune_itself_are_no_components() -> None:
    assert not BY_NAME.keys() & {"pytest", "ruff", "mypy", "hypothesis", "attune-fl"}
    assert MATERIALS["metadata"]["component"]["name"] == "attune-fl"


def test_every_reference_is_to_something_that_is_listed() -> None:
    listed = {component["bom-ref"] for component in (*MATERIALS["components"], MATERIALS["metadata"]["component"])}
    relations = {relation["ref"]: set(relation["dependsOn"]) for relation in MATERIALS["dependencies"]}
    assert relations.keys() == listed and set().union(*relations.values()) <= listed
    assert f"pkg:pypi/cffi@{version('cffi')}" in relations[f"pkg:pypi/cryptography@{version('cryptography')}"]
    assert (MATERIALS["bomFormat"], MATERIALS["specVersion"]) == ("CycloneDX", "1.6")


def test_the_same_installation_gives_the_same_bill() -> None:
    assert components() == MATERIALS
