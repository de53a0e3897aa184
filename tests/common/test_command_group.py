"""Names on the command line: of devices, runs and people, in every Unicode form that a keyboard makes."""

import unicodedata
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from attune.common.command_group import NAME, RoundsType
from attune.fedclient.cli import main as fedclient
from attune.fedserver.cli import cli as fedserver
from attune.fedserver.home import ServerHome

NAMES = {"name", "only_for", "readmit"}
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "München") for form in ("NFC", "NFD"))


def parameters(command: click.Command, path: str) -> Iterator[tuple[str, click.Parameter]]:
    yield from ((path, parameter) for parameter in command.params)
    if isinstance(command, click.Group):
        for word, inner in command.commands.items():
            yield from parameters(inner, f"{path} {word}")


def test_every_parameter_that_takes_a_name_composes_its_letters() -> None:
    taking = [
        (path, parameter)
        for group, path in ((fedserver, "fedserver"), (fedclient, "fedclient"))
        for path, parameter in parameters(group, path)
        if parameter.name in NAMES
    ]
    assert len(taking) > 6
    assert [path for path, parameter in taking if parameter.type is not NAME] == []


@pytest.mark.parametrize("first", [COMPOSED, DECOMPOSED])
@pytest.mark.parametrize("second", [COMPOSED, DECOMPOSED])
def test_a_name_is_the_same_however_its_letters_were_typed(first: str, second: str, tmp_path: Path) -> None:
    home = ServerHome(tmp_path / "home")
    home.create()
    home.note("made", "test")  # makes the ledger

    def run(*words: str) -> str:
        done = CliRunner().invoke(fedserver, ["dashboard-token", *words, "--home", str(home.path)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    run("add", first, "--role", "viewer")
    assert COMPOSED in run("list")
    run("remove", second)
    assert COMPOSED not in run("list")


def test_rounds_are_a_number_or_auto() -> None:
    assert [RoundsType(1).convert(text, None, None) for text in ("auto", "7")] == ["auto", 7]
    for wrong in ("0", "Auto", "many"):
        with pytest.raises(click.BadParameter):
            RoundsType(1).convert(wrong, None, None)
