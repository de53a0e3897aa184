"""The files of deploy/ in a form that tests can compare with the code."""

import configparser
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture
def deploy() -> Path:
    return ROOT / "deploy"


@pytest.fixture
def commands() -> dict[str, Path]:
    """Return the installed commands by name."""
    return {name: BIN / name for name in ("fedserver", "fedclient")}


@pytest.fixture
def unit(deploy: Path) -> Callable[[str], configparser.ConfigParser]:
    """Return a reader of units. If a key comes twice, the last one counts, except where a test reads the text itself."""

    def read(name: str) -> configparser.ConfigParser:
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string((deploy / name).read_text())
        return parser

    return read


@pytest.fixture
def instructions(deploy: Path) -> Callable[[str], list[tuple[str, str]]]:
    """Return a reader of Dockerfiles as (INSTRUCTION, rest), with continued lines joined and comments dropped."""

    def read(name: str) -> list[tuple[str, str]]:
        lines = [
            line for line in (deploy / name).read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")
        ]
        joined = "\n".join(lines).replace("\\\n", " ")
        return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]

    return read


@pytest.fixture
def parse() -> Callable[[list[str]], click.Context]:
    """Return a parser that reads a command line as the command itself would, without running it.

    Its errors are those of click.
    """

    def check(words: list[str]) -> click.Context:
        from attune.fedclient.cli import main as client
        from attune.fedserver.cli import cli as server

        group: click.Group = {"fedserver": server, "fedclient": client}[Path(words[0]).name]
        context = group.make_context(words[0], list(words[1:]))
        rest = [*context._protected_args, *context.args]
        if not rest:
            return context
        name, command, arguments = group.resolve_command(context, rest)
        assert command is not None
        return command.make_context(name, arguments, parent=context)

    return check


@pytest.fixture
def attune_lines(deploy: Path) -> list[list[str]]:
    """Return every fedserver or fedclient command line in the README, from the command's name on."""
    found, inside = [], False
    for line in (deploy / "README.md").read_text().splitlines():
        if line.startswith("```"):
            inside = not inside
            continue
        words = shlex.split(line.replace("$(", "").replace(")", "")) if inside else []
        at = next((i for i, word in enumerate(words) if Path(word).name in ("fedserver", "fedclient")), None)
        if at is not None and "systemctl" not in words:
            found.append(words[at:])
    return found
