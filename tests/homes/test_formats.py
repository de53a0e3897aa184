"""Every kept file has a version or a reason for none, and files of a later format are refused in one line.

A file without a format is of format 1. Later formats are refused also where this version could not read their fields.
"""

import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attune.common.config import PrivacySettings
from attune.common.errors import AttuneError
from attune.common.identity.signed_files import verify
from attune.features.web.page_tokens import listed
from attune.features.web.pages import SavedAddress, remembered
from attune.fedclient.disclosure_log import read_log
from attune.fedclient.home import DeviceHome
from attune.fedclient.model.artifact import read_info
from attune.fedclient.work.private.ledger import PrivacyLedger
from attune.fedserver.home import ServedAddress, ServerHome
from attune.fedserver.view.backup import back_up, restore_to
from attune.fedserver.view.export import export_home
from attune.fedserver.view.summary import read_rows, read_summary
from tests.homes.kept import BACKUP, DEVICES, EXPORTED, FIELD, PRIVACY, SERVER, unlisted
from tests.homes.make import COMING, HERE, unpack

LATER = {"format": 3, "version": 3, "name": ["of another type"], "host": 7, "secret": 7, "method": 7}
TABLES = {"server": SERVER, "device": DEVICES, "export": EXPORTED, "backup": BACKUP, "privacy": PRIVACY}
Read = Callable[[Path], Any]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished server, its device, an export, a backup, and a privacy ledger."""
    folder = tmp_path_factory.mktemp("kept")
    unpack(HERE / "finished.tar.xz", folder / "made")
    server = folder / "made" / "server"
    server.rename(folder / "server")
    next((folder / "made" / "devices").iterdir()).rename(folder / "device")
    home = ServerHome(folder / "server")
    home.write_address(ServedAddress("localhost", 7, 8))
    export_home(home, folder / "export")
    list(back_up(home, folder / "backup"))
    PrivacyLedger.of_data(folder / "privacy", folder / "data.csv", "sha256:1").begin("f/", PrivacySettings(noise=1.0), 0.1, 2)
    return folder


@pytest.mark.parametrize("kind", COMING)
def test_every_kept_file_of_an_earlier_home_is_listed(kind: str, tmp_path: Path) -> None:
    unpack(HERE / f"{kind}.tar.xz", tmp_path / "made")
    assert unlisted(tmp_path / "made" / "server", SERVER) == []
    for device in (tmp_path / "made" / "devices").iterdir():
        assert unlisted(device, DEVICES) == []


def test_every_file_of_an_export_a_backup_and_a_privacy_ledger_is_listed(kept: Path) -> None:
    assert unlisted(kept / "export", EXPORTED) == []
    assert unlisted(kept / "backup", SERVER, BACKUP) == []
    assert unlisted(kept / "privacy", PRIVACY) == []


def test_a_new_file_is_no_longer_overlooked(tmp_path: Path) -> None:
    for name in ("new.json", "state/new.json", "runs/first/new.json", "runs/first/audit.jsonl", ".new.0123456789ab.tmp"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert unlisted(tmp_path, SERVER) == ["new.json", "runs/first/new.json", "state/new.json"]


def opened(path: Path) -> None:
    with DeviceHome(path.parent).locked():
        pass


def of_a_newer_schema(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 99")
    ServerHome(path.parent).snapshot()


READERS: dict[tuple[str, str], tuple[str, Read]] = {
    ("server", "state.sqlite"): ("", of_a_newer_schema),
    ("server", "server.json"): ("", lambda path: ServerHome(path.parent).address()),
    ("server", "dashboard.json"): ("", lambda path: remembered(ServerHome(path.parent))),
    ("server", "dashboard-tokens.json"): ("", lambda path: listed(ServerHome(path.parent))),
    ("device", "format"): ("2\n", opened),
    ("device", "disclosed.jsonl"): ("", read_log),
    ("device", "model/model.json"): ("", lambda path: read_info(path.parent)),
    ("device", "model/signature.json"): ("", lambda path: verify(path.parent, b"")),
    ("export", "signature.json"): ("", lambda path: verify(path.parent, b"")),
    ("export", "summary.json"): ("", lambda path: read_summary(path.parent)),
    ("backup", "MANIFEST.json"): (
        "",
        lambda path: list(restore_to(path.parent, ServerHome(path.parent.parent / "new"), None, ())),
    ),
    ("privacy", "*/ledger.json"): ("", lambda path: PrivacyLedger.of_data(path.parents[1], Path("data.csv"), "sha256:1")),
}


def test_every_version_of_its_own_has_a_reader_below() -> None:
    own = {(folder, name) for folder, table in TABLES.items() for name, place in table.items() if place == FIELD}
    assert own == set(READERS)


@pytest.mark.parametrize(("folder", "name"), READERS)
def test_a_file_of_a_later_format_is_refused_in_one_line(kept: Path, tmp_path: Path, folder: str, name: str) -> None:
    shutil.copytree(kept / folder, tmp_path / folder)
    path = next((tmp_path / folder).glob(name), tmp_path / folder / name)
    text, read = READERS[folder, name]
    if path.suffix != ".sqlite":
        path.write_text(text or json.dumps(LATER))
    with pytest.raises(AttuneError) as refused:
        read(path)
    line = str(refused.value)
    assert "\n" not in line and str(path if folder != "device" or name != "format" else path.parent) in line
    assert re.search(r"newer version of fed(server|client).*: update|reads formats up to 1: update it$", line)


def test_the_tables_of_a_later_export_are_refused_by_its_summary(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "export", tmp_path / "export")
    read_rows(tmp_path / "export")
    (tmp_path / "export" / "summary.json").write_text(json.dumps(LATER))
    with pytest.raises(AttuneError, match=r"newer version of fedserver: update fedserver$"):
        read_rows(tmp_path / "export")


def test_files_without_a_format_are_read_and_new_ones_have_it(kept: Path, tmp_path: Path) -> None:
    home = ServerHome(tmp_path)
    home.write_address(ServedAddress("localhost", 7, 8))
    new = [tmp_path / "server.json", kept / "export" / "summary.json", next((kept / "privacy").glob("*/ledger.json"))]
    assert [json.loads(path.read_bytes())["format"] for path in new] == [1, 1, 1]
    (tmp_path / "server.json").write_text(json.dumps({"host": "localhost", "port": 7, "pid": 8}))
    assert home.address() == ServedAddress("localhost", 7, 8)
    (tmp_path / "dashboard.json").write_text(json.dumps({"host": "localhost", "port": 7}))
    assert remembered(home) is not None
    assert json.loads(msgspec.json.encode(SavedAddress("localhost", 7)))["format"] == 1
    assert read_info(kept / "device" / "model").format == 1
