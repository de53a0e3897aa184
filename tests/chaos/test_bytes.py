"""One flipped byte in every kind of file of a home and in every table of the database: `verify` names it."""

import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from attune.fedclient.cli import main as fedclient
from attune.fedserver.cli import cli as fedserver
from tests.homes.make import HERE, unpack

DAMAGED = 4  # exit code
# They are written anew at each start, or are leftovers that no start reads.
WRITTEN_ANEW = {"server.json", "local-token", "operator.pem", "dashboard-token", "device.json", "dashboard.json", "format"}
COMMANDS = {"server": fedserver, "devices/d0": fedclient}


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x5A]) + data[at + 1 :]


def kind_of(path: Path) -> str:
    """Return a file's path without the digests and numbers in which files of one kind differ."""
    return re.sub(r"[0-9a-f]{16,}|\d+", "N", re.sub(r"host-d\d", "DEVICE", str(path)))


def kinds_of(home: Path) -> dict[str, Path]:
    files = [path.relative_to(home) for path in sorted(home.rglob("*")) if path.is_file() and path.stat().st_size]
    return {kind_of(path): path for path in files if path.name != "lock" and not path.name.startswith("state.sqlite")}


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack homes in the middle of a round."""
    folder = tmp_path_factory.mktemp("homes") / "kept"
    unpack(HERE / "schema3.tar.xz", folder)
    return folder


def verified(side: str, home: Path) -> tuple[int, str]:
    result = CliRunner().invoke(COMMANDS[side], ["verify", "--home", str(home)])
    return result.exit_code, result.output


@pytest.mark.parametrize("side", list(COMMANDS))
def test_a_flipped_byte_in_any_kind_of_file_is_named(homes: Path, side: str) -> None:
    home = homes / side
    code, said = verified(side, home)
    assert code == 0, said
    kinds = kinds_of(home)
    silent = []
    for path in kinds.values():
        data = (home / path).read_bytes()
        for at in (0, len(data) // 2, len(data.rstrip()) - 1):
            (home / path).write_bytes(flip(data, at))
            code, said = verified(side, home)
            if (code != DAMAGED or path.name not in said) and path.name not in WRITTEN_ANEW:
                silent.append(f"{path} byte {at} of {len(data)}: exit {code} {said.strip()[-100:]}")
        (home / path).write_bytes(data)
    assert len(kinds) > 6
    assert silent == []


def cells(database: Path) -> dict[str, bytes]:
    """Return a value of each table with rows that stands in one piece in the file: the longest of its first rows."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        tables = [
            row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        ]
        values = {}
        content = database.read_bytes()
        for table in tables:
            rows = db.execute(f"SELECT * FROM {table} LIMIT 50").fetchall()  # noqa: S608
            raw = [
                value.encode() if isinstance(value, str) else value
                for row in rows
                for value in row
                if isinstance(value, (str, bytes))
            ]
            whole = [value for value in raw if len(value) > 1 and value in content]
            if whole:
                values[table] = max(whole, key=len)
    return values


def test_a_flipped_byte_in_any_table_is_named(homes: Path) -> None:
    home = homes / "server"
    database = home / "state.sqlite"
    with closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content, silent, values = database.read_bytes(), [], cells(database)
    for table, value in values.items():
        at = content.index(value) + len(value) // 2
        database.write_bytes(flip(content, at))
        for leftover in home.glob("state.sqlite-*"):
            leftover.unlink()
        code, said = verified("server", home)
        if code != DAMAGED or "state.sqlite" not in said:
            silent.append(f"{table}: exit {code} {said.strip()[-200:]}")
    database.write_bytes(content)
    assert {"meta", "devices", "certificates", "tokens", "slots", "metrics"} <= values.keys()
    assert silent == []


def test_a_database_that_is_older_than_the_files_is_named(homes: Path) -> None:
    """Without its write-ahead log the database is of an earlier round. Only a start said so, and `verify` said "whole"."""
    inbox = homes / "server" / "inbox"
    shutil.copytree(inbox / "train-2-host-d0", inbox / "train-5-host-d0")
    code, said = verified("server", homes / "server")
    shutil.rmtree(inbox / "train-5-host-d0")
    assert code == DAMAGED
    assert "the database (state.sqlite) counts 1 closed rounds" in said
