"""Output of `fedserver run stop` and `fedserver dashboard`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from attune.fedserver import runs
from attune.fedserver.cli import cli
from attune.fedserver.web import pages


@pytest.mark.parametrize(
    ("closed", "said"),
    [(3, "the run is over after 3 rounds; start the server once more"), (0, "the race of methods is given up")],
)
def test_the_end_of_a_run_and_of_a_race_are_told_apart(
    closed: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "stop", lambda *_: closed)
    done = CliRunner().invoke(cli, ["run", "stop", "--home", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0 and done.output.startswith(said)


def test_the_command_prints_the_address_of_a_running_page_and_serves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "running_page", lambda _: "https://here:1/")
    monkeypatch.setattr(pages, "show", None)
    done = CliRunner().invoke(cli, ["dashboard", "--home", str(tmp_path)], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, "https://here:1/\n")
