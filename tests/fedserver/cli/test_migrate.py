"""`fedserver migrate`: a home's state goes to PostgreSQL and S3 and comes back, whole, however often the move is killed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attune.common import aio
from attune.common.errors import HomeMismatch, SettingError
from attune.fedserver.cli import cli
from attune.fedserver.home import ServerHome
from attune.fedserver.ports.blobs import INBOX, STATE
from attune.fedserver.ports.ledger import Certificate, Refusal, Token
from tests import engines
from tests.fedserver.cli.test_verify import home as home_after_a_round
from tests.forked import ENTRIES, Forked

pytest.importorskip("psycopg")
pytestmark = pytest.mark.engines
home = home_after_a_round


@pytest.fixture
def ready(home: Path) -> Iterator[Path]:
    """Add members, tokens and an audit log to the home of `fedserver verify`."""

    async def fill() -> None:
        async with ServerHome(home).open() as storage:
            ledger = storage.ledger
            for number in (2, 1, 3):
                await ledger.add_token(Token(f"t{number}", b"pem", 5, 1e9, "operator", id=f"{number}", uses=5))
            await ledger.enrol("kiel", "key", Certificate("f", "kiel", "device", 1e9, issued_at=0.1 + 0.2), 1.5, "t2")
            await ledger.update_device("kiel", note="ä \N{SNOWMAN}", progress=1 / 3)
            await ledger.replace_operator(Certificate("o", "operator", "operator", 1e9))
            await ledger.refuse(Refusal("eve", "bad-token", "no", 5.25), keep=3)
            await ledger.set_overrides({"method": {"name": "fedavg"}})
            await ledger.note("enrolled", "a test", name="kiel", certificate="f")

    aio.run(fill())
    yield home


def migrate(home: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["migrate", "--home", str(home), *words])


def all_of(home: Path) -> Any:
    """Return all that counts in a home: the ledger, tokens, the audit log, and the bytes of all blobs."""
    storage = ServerHome(home).open()

    async def tokens() -> list[Token]:
        async with storage as opened:
            return await opened.ledger.tokens()

    with ServerHome(home).reading() as reader:
        ledger, log = reader.snapshot(), list(reader.audit())
    blobs = {name: storage.blobs.get(name) for area in (STATE, INBOX) for name in storage.blobs.names(area)}
    return ledger, log, aio.run(tokens()), blobs


def test_there_and_back_nothing_changes(ready: Path) -> None:
    before, words = all_of(ready), engines.remote_words()
    assert len(before[3]) > 5
    result = migrate(ready, *words)
    assert result.exit_code == 0, result.output
    assert not list(ready.glob("state*")) and not (ready / "inbox").exists() and not list(ready.glob("audit*"))
    assert all_of(ready) == before
    assert CliRunner().invoke(cli, ["verify", "--home", str(ready)]).output == f"{ready} is whole\n"
    assert migrate(ready, *words).exit_code == 0, "a second time is no fault"
    assert isinstance(migrate(ready, *engines.remote_words()).exception, SettingError)
    result = migrate(ready, "--to-folder")
    assert result.exit_code == 0, result.output
    left = engines.postgres().tables(words[1])
    assert f"{len(left)} tables and the object owner stay there" in result.output
    assert {name for name, rows in left.items() if rows} == {"schema_version", "commits", "meta"} and left["meta"] == 2
    shutil.rmtree(ready / "cache")
    assert all_of(ready) == before
    assert CliRunner().invoke(cli, ["verify", "--home", str(ready)]).output == f"{ready} is whole\n"
    assert migrate(ready, *words).exit_code == 0, "the database and the prefix are empty again"
    assert all_of(ready) == before


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("step", ["copy_rows", "put_value", "_compare", "sync", "_empty_folder", "write_database"])
def test_a_move_that_was_interrupted_goes_on(ready: Path, monkeypatch: pytest.MonkeyPatch, step: str, back: bool) -> None:
    from attune.features.remote import migrate as moving

    before, words = all_of(ready), engines.remote_words()
    if back:
        assert migrate(ready, *words).exit_code == 0
        words = ["--to-folder"]

    def die(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(moving, step, die)
        migrate(ready, *words)
    assert all_of(ready) == before, "either place is whole"
    result = migrate(ready, *words)
    assert result.exit_code == 0, result.output
    assert all_of(ready) == before


def test_a_move_that_is_killed_again_and_again_arrives(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before, words = all_of(ready), engines.remote_words()
    log = (tmp_path_factory.mktemp("log") / "log").open("ab")
    for target in (words, ["--to-folder"]):
        killed, delay_s, code = 0, 0.05, -9
        while code != 0:
            child = Forked(["fedserver", "migrate", "--home", str(ready), *target], log, log, os.environ, ENTRIES["fedserver"])
            end = time.monotonic() + delay_s
            while child.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
                killed += 1
            code = child.wait(10)
            assert code in (0, -9)
            delay_s *= 2
        assert killed
        assert all_of(ready) == before


def test_a_damaged_home_and_a_place_that_is_taken_are_refused(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    words, before = engines.remote_words(), all_of(ready)
    other = tmp_path_factory.mktemp("other") / "home"
    shutil.copytree(ready, other)
    path = ready / "state" / "shared.value.1.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"\0")
    refused = migrate(ready, *words).exception
    assert isinstance(refused, HomeMismatch) and "nothing was moved" in str(refused)
    path.write_bytes(data)
    assert migrate(ready, *words).exit_code == 0
    taken = migrate(other, *words).exception
    assert isinstance(taken, HomeMismatch) and "holds a federation already" in str(taken), taken
    assert all_of(ready) == all_of(other) == before


def test_a_backup_of_such_a_home_names_the_tools_to_use(ready: Path, tmp_path: Path) -> None:
    assert migrate(ready, *engines.remote_words()).exit_code == 0
    result = CliRunner().invoke(cli, ["backup", "--home", str(ready), "--out", str(tmp_path / "backup")])
    assert isinstance(result.exception, HomeMismatch) and "pg_dump" in str(result.exception)


def test_a_home_without_its_authority_is_refused(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert migrate(ready, *engines.remote_words()).exit_code == 0
    other = tmp_path_factory.mktemp("other")
    shutil.copy(ready / "storage.json", other)
    with pytest.raises(HomeMismatch, match="copy that folder from the server that has it"):
        ServerHome(other).check()
