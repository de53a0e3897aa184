"""`fedserver restore` of an older backup: devices that were revoked since stay revoked, unless the operator says otherwise."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from attune.common import aio
from attune.common.identity.credential import csr_der, fingerprint_of, new_key
from attune.common.identity.token import JoinToken
from attune.features.web import pages
from attune.fedserver import runs
from attune.fedserver.cli import cli
from attune.fedserver.home import ServerHome
from attune.fedserver.identity.admin import FederationAdmin
from attune.fedserver.identity.registrar import Registrar


def decide(folder: Path, enrolled: tuple[str, ...], revoked: tuple[str, ...]) -> None:
    """Enrol and revoke devices in a home."""

    async def work() -> None:
        home = ServerHome(folder)
        authority = home.open_authority()
        async with home.open() as storage:
            admin, registrar = FederationAdmin(storage.ledger, "a test"), Registrar(authority, storage.ledger, 90.0)
            token = JoinToken.parse(await admin.new_token(authority.public_key_compressed, uses=9))
            for name in enrolled:
                await registrar.enrol(fingerprint_of(token.bootstrap().certificate_pem), name, csr_der(new_key(), name))
            for name in revoked:
                await admin.revoke(name)

    aio.run(work())


def fedserver(*words: str | Path, code: int = 0) -> str:
    done = CliRunner().invoke(cli, [str(word) for word in words])
    assert done.exit_code == code, (done.output, done.exception)
    return f"{done.output}{done.exception or ''}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a home and its backup; afterwards `eve` and `mallory` are revoked, and `late` is enrolled."""
    ServerHome(tmp_path / "home").create()
    decide(tmp_path / "home", ("ada", "eve", "mallory"), ())
    fedserver("backup", "--home", tmp_path / "home", "--out", tmp_path / "backup")
    decide(tmp_path / "home", ("late",), ("eve", "mallory"))
    return tmp_path


def revoked(folder: Path) -> dict[str, bool]:
    return {device.name: device.revoked for device in ServerHome(folder).snapshot().devices}


def test_devices_that_were_revoked_since_stay_revoked_and_are_listed(folder: Path) -> None:
    log = ("--audit-log", folder / "home" / "audit.jsonl")
    said = fedserver("restore", "--from", folder / "backup", "--home", folder / "new", *log)
    assert "eve was revoked" in said and "mallory was revoked" in said and "late was enrolled" in said
    assert revoked(folder / "new") == {"ada": False, "eve": True, "late": False, "mallory": True}
    assert "is whole" in fedserver("verify", "--home", folder / "new")
    events = fedserver("audit", "--home", folder / "new")
    assert "restored" in events and "device revoked" in events and "each follows the one before" in events


def test_an_operator_readmits_a_device_by_its_name(folder: Path) -> None:
    shutil.move(folder / "home", folder / "old")
    log = ("--audit-log", folder / "old" / "audit.jsonl")
    said = fedserver("restore", "--from", folder / "backup", "--home", folder / "new", *log, "--readmit", "eve")
    assert "eve is readmitted" in said
    assert revoked(folder / "new") == {"ada": False, "eve": False, "late": False, "mallory": True}
    assert "is whole" in fedserver("verify", "--home", folder / "new")
    decide(folder / "new", (), ("eve",))
    assert revoked(folder / "new")["eve"]


def test_only_a_device_that_was_revoked_since_is_readmitted(folder: Path) -> None:
    more = ("--audit-log", folder / "home" / "audit.jsonl", "--readmit", "ada")
    said = fedserver("restore", "--from", folder / "backup", "--home", folder / "new", *more, code=1)
    assert "ada was not revoked" in said
    assert not (folder / "new").exists()


def test_a_log_of_another_home_is_refused(folder: Path) -> None:
    ServerHome(folder / "other").create()
    decide(folder / "other", ("ada",), ())
    log = ("--audit-log", folder / "other" / "audit.jsonl")
    assert "does not continue" in fedserver("restore", "--from", folder / "backup", "--home", folder / "new", *log, code=1)
    assert not (folder / "new").exists()


def test_without_a_newer_log_the_operator_is_told_what_may_be_lost(folder: Path) -> None:
    said = fedserver("restore", "--from", folder / "backup", "--home", folder / "new")
    assert "--audit-log" in said and "revoked after" in said
    assert revoked(folder / "new") == {"ada": False, "eve": False, "mallory": False}


def test_a_damaged_log_is_named_and_refused(folder: Path) -> None:
    log = folder / "home" / "audit.jsonl"
    log.write_bytes(log.read_bytes().replace(b"mallory", b"nobody!", 1))
    said = fedserver("restore", "--from", folder / "backup", "--home", folder / "new", "--audit-log", log, code=1)
    assert f"{log}, line" in said and not (folder / "new").exists()


def test_certificates_of_earlier_holders_of_a_name_stay_revoked(tmp_path: Path) -> None:
    """A name is held by three devices in turn, two of which are revoked; each of them has renewed its certificate."""
    home = ServerHome(tmp_path / "home")
    home.create()
    certificates: list[str] = []

    async def hold() -> None:
        """Enrol a device as ada, renew its certificate, and revoke the holder before."""
        authority, key = home.open_authority(), new_key()
        async with home.open() as storage:
            admin, registrar = FederationAdmin(storage.ledger, "a test"), Registrar(authority, storage.ledger, 90.0)
            if certificates:
                await admin.revoke("ada")
            token = JoinToken.parse(await admin.new_token(authority.public_key_compressed, only_for="ada"))
            request = csr_der(key, "ada")
            pem = await registrar.enrol(fingerprint_of(token.bootstrap().certificate_pem), "ada", request)
            certificates.extend(map(fingerprint_of, (pem, await registrar.renew("ada", request))))

    aio.run(hold())
    fedserver("backup", "--home", home.path, "--out", tmp_path / "backup")
    aio.run(hold())
    aio.run(hold())
    new = ServerHome(tmp_path / "new")
    fedserver("restore", "--from", tmp_path / "backup", "--home", new.path, "--audit-log", home.path / "audit.jsonl")
    snapshot = new.snapshot()
    let_in = {device.name for device in snapshot.devices if not device.revoked}
    assert let_in == {"ada"} and len(snapshot.devices) == 3
    held = {certificate.fingerprint for certificate in snapshot.certificates if certificate.name in let_in}
    assert held == set(certificates[4:])
    said = fedserver("restore", "--from", tmp_path / "backup", "--home", tmp_path / "old")
    assert "is let in again" in said and revoked(tmp_path / "old") == {"ada": False}


# --- output of `fedserver run stop` and `fedserver dashboard`


@pytest.mark.parametrize(
    ("closed", "said"),
    [(3, "the run is over after 3 rounds; start the server once more"), (0, "the race of methods is given up")],
)
def test_the_end_of_a_run_and_of_a_race_are_told_apart(closed: int, said: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(runs, "stop", lambda *_: closed)
    done = CliRunner().invoke(cli, ["run", "stop", "--home", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0 and done.output.startswith(said)


def test_the_command_prints_the_address_of_a_running_page_and_serves_none(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(pages, "running_page", lambda _: "https://here:1/")
    monkeypatch.setattr(pages, "show", None)
    done = CliRunner().invoke(cli, ["dashboard", "--home", str(tmp_path)], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, "https://here:1/\n")
