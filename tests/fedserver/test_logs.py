"""The form of log lines."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from attune.fedserver import logs


@pytest.fixture
def quiet_again() -> Iterator[None]:
    """Restore the log after a test."""
    root, own = logging.getLogger(), logging.getLogger(logs.LOGGER)
    handlers, levels = list(root.handlers), (root.level, own.level)
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    own.setLevel(levels[1])


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def say() -> None:
    log = logging.getLogger("fedserver")
    log.debug("details")
    log.info("kiel connected", extra={"device": "kiel"})
    log.warning("the disk is full")


@pytest.mark.usefixtures("quiet_again")
def test_a_text_line_has_time_level_round_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin("text", 0)
    logs.follow(lambda: 3)
    say()
    first, second = lines(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00 INFO round=3 device=kiel kiel connected", first)
    assert re.fullmatch(r"\S+ WARNING round=3 the disk is full", second)


@pytest.mark.usefixtures("quiet_again")
def test_a_json_line_is_one_object_with_a_traceback_too(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin("json", 0)
    say()
    try:
        raise ValueError("of a\nkind")
    except ValueError as error:
        logging.getLogger("fedserver").error("failed: %s", error, exc_info=error)
    told = [json.loads(line) for line in lines(capsys)]
    assert told[0] | {"time": ""} == {
        "time": "", "level": "info", "message": "kiel connected", "round": None, "device": "kiel"
    }  # fmt: skip
    assert told[2]["message"] == "failed: of a\nkind" and "ValueError" in told[2]["traceback"]


@pytest.mark.usefixtures("quiet_again")
@pytest.mark.parametrize(("verbosity", "count"), [(-1, 1), (0, 2), (1, 3)])
def test_how_much_is_said(capsys: pytest.CaptureFixture[str], verbosity: int, count: int) -> None:
    logs.begin("text", verbosity)
    say()
    assert len(lines(capsys)) == count


@pytest.mark.usefixtures("quiet_again")
def test_what_a_start_says_is_plain_in_the_log_or_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    logs.begin("json", 0)
    plain: list[str] = []
    logs.speaker("text", 0, plain.append)("the address")
    logs.speaker("text", -1, plain.append)("the address")
    logs.speaker("json", 0, plain.append)("the token")
    assert plain == ["the address"]
    assert [json.loads(line)["message"] for line in lines(capsys)] == ["the token"]


@pytest.mark.parametrize("both", [False, True])
def test_a_closed_output_is_named_once_and_ends_nothing(tmp_path: Path, both: bool) -> None:
    """Start a process as in `fedserver | head -1`. Each line of the log printed a traceback."""
    code = (
        "import logging, sys, time; from attune.fedserver import logs; import click; logs.begin('text', 0)\n"
        "say = logs.speaker('text', 0, click.echo)\n"
        "time.sleep(0.5)\n"
        "for n in range(5): logging.getLogger('fedserver').warning('line %d', n); say('said')\n"
        "open(sys.argv[1], 'w').write('to the end')\n"
    )
    end = tmp_path / "end"
    tail = "2>&1 | true" if both else "| true"
    command = f"'{sys.executable}' -c \"$CODE\" '{end}' {tail}"
    done = subprocess.run(["sh", "-c", command], env=os.environ | {"CODE": code}, capture_output=True, text=True, timeout=60)
    assert end.read_text() == "to the end"
    assert done.stderr == ("" if both else logs.CLOSED + "\n")
