"""Starts of server and devices with a flipped byte in any kind of file, or any table: one clear line, or equal bits.

No device is told to throw away its private state because the server's home is damaged.
"""

import shutil
import sqlite3
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.chaos.test_bytes import DAMAGED, WRITTEN_ANEW, cells, flip, kind_of
from tests.e2e.harness import Process, _script, until
from tests.forked import ROOT, STEADY
from tests.homes.make import HERE, HOST, PORTABLE, Site, begin, held

PATIENCE_S = 60.0
ARCHIVES = ("schema3", "midrun", "finished")  # a later one adds the kinds of files that those before it lack
TABLES = ("meta", "devices", "certificates", "tokens", "slots", "metrics")
# A device whose own files are whole is never told any of this.
THROWS_AWAY = ("new --home", "enrol again", "another federation", "delete ", "begin anew", "damaged")
DEVICE_LABELS = ("--label", "ill", "--baseline", "local")

pytestmark = pytest.mark.timeout(300)


def kinds(archive: str, side: str) -> dict[str, str]:
    """Return a file of each kind in an archive's home, by its kind. Homes that are made anew have the same."""
    with tarfile.open(HERE / f"{archive}.tar.xz") as packed:
        entries = [
            Path(entry.name).relative_to(side) for entry in packed if entry.isfile() and entry.name.startswith(f"{side}/")
        ]
    files = [path for path in sorted(entries) if not path.name.startswith("state.sqlite") and not path.name.endswith("lock")]
    return {kind_of(path): str(path) for path in files}


def cases() -> Iterator[tuple[str, str, str, str]]:
    """Yield a kind of home, a side, a file there, and which byte is changed."""
    for side in ("server", "devices/d0"):
        seen: set[str] = set()
        for archive in ARCHIVES:
            for kind, path in kinds(archive, side).items():
                if kind not in seen:
                    seen.add(kind)
                    yield archive, side, path, "a byte"
                    if path.endswith((".json", ".jsonl", "format")):
                        yield archive, side, path, "a digit"


@dataclass
class Run:
    """Continuation of a home: exit codes by process (None: it ran on), what each said, and the bits if all is done."""

    codes: dict[str, int | None]
    said: dict[str, str]
    bits: dict[str, str] | None

    def lines(self, who: str) -> list[str]:
        return [line for line in self.said[who].splitlines() if line.startswith(("fedserver: ", "fedclient: "))]


def go_on(folder: Path, alone: bool, archive: str, damaged: Path | None = None, whole: bytes = b"") -> Run:
    """Start the server, and the devices in one process, or d0 in a process of its own, and wait for the end of all.

    Args:
        folder: The homes.
        alone: Whether d0 has a process of its own.
        archive: The kind of homes.
        damaged: A damaged file. If it still is as it is now in the end, nothing has read it, and it gets its bytes again.
        whole: Its bytes before the damage.
    """
    broken = damaged.read_bytes() if damaged else b""
    environment = {**STEADY, **PORTABLE, "PATH": "/usr/bin:/bin", "ATTUNE_HOME": str(folder / "none")}
    processes: dict[str, Process] = {}
    words = ["--home", str(folder / "server"), "--host", "127.0.0.1", "--port", "0", "--dashboard", "off"]
    server = processes["server"] = Process([_script("fedserver"), *words], folder / "server.log", environment)
    try:
        until(lambda: "listens on" in server.text or server.popen.poll() is not None, "the server to listen", PATIENCE_S)
        if server.popen.poll() is None:
            port = int(server.wait_for(r"listens on \S+:(\d+) ")[1])
            suffix = "csv" if archive == "finished" else "npz"
            groups = {"d0": ["d0"], "others": ["d1", "d2"]} if alone else {"others": ["d0", "d1", "d2"]}
            for who, members in groups.items():
                name, home = (HOST, "devices") if len(members) > 1 else (f"{HOST}-{who}", f"devices/{who}")
                data = [word for member in members for word in ("--data", str(folder / "shards" / f"{member}.{suffix}"))]
                to = ["--server", f"localhost:{port}", "--device", "cpu", "--home", str(folder / home), "--name", name]
                more = ["--threads", "1", *(DEVICE_LABELS if archive == "finished" else ())]
                device = processes[who] = Process([_script("fedclient"), *data, *to, *more], folder / f"{who}.log", environment)
                if who == "d0":  # it must be there before the round closes; if it ends, the others are not needed
                    until(
                        lambda device=device: f"{HOST}-d0 connected" in server.text or device.popen.poll() is not None,
                        "d0 to connect",
                        PATIENCE_S,
                    )
                    if device.popen.poll() is not None:
                        break
        deadline = time.monotonic() + PATIENCE_S
        while server.popen.poll() is None and time.monotonic() < deadline:
            codes = [process.popen.poll() for who, process in processes.items() if who != "server"]
            if None not in codes or any(codes):
                break
            time.sleep(0.05)
        codes = {who: process.popen.poll() for who, process in processes.items()}
        done = (
            len(processes) > alone + 1
            and all(code == 0 for who, code in codes.items() if who != "server")
            and codes["server"] is None
        )
        if done:
            server.stop()
            if damaged and damaged.exists() and damaged.read_bytes() == broken and damaged.suffix == ".safetensors":
                damaged.write_bytes(whole)
        return Run(codes, {who: process.text for who, process in processes.items()}, held(folder) if done else None)
    finally:
        for process in processes.values():
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()


Undisturbed = Callable[[str], tuple[Path, dict[str, str]]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return a function that gives a home, made by this version, and the bits of its undisturbed continuation."""
    kept: dict[str, tuple[Path, dict[str, str]]] = {}

    def made(archive: str) -> tuple[Path, dict[str, str]]:
        if archive not in kept:
            home, again = (tmp_path_factory.mktemp("homes") / name for name in (archive, "again"))
            home.mkdir()
            with Site(ROOT, home) as site:
                begin(site, archive)
            shutil.copytree(home, again)
            run = go_on(again, False, archive)
            assert run.bits is not None, run
            kept[archive] = home, run.bits
        return kept[archive]

    return made


def check(run: Run, victim: str, name: str, expected: dict[str, str]) -> None:
    """Check that the damage ended in one clear line of the damaged side, or in the expected bits.

    A device that has lost its newest order says so in a warning, and goes on from the order before it: then bits may differ.
    """
    for who, said in run.said.items():
        assert "Traceback" not in said, said
        if who not in (victim, "server"):
            assert not any(word in said for word in THROWS_AWAY), f"{who} is told: {said[-500:]}"
    others = {who: code for who, code in run.codes.items() if who != victim}
    assert not any(others.values()), f"{others}: {run.said}"
    if run.codes[victim]:
        lines = run.lines(victim)
        assert len(lines) == 1, run.said[victim]
        assert run.codes[victim] == DAMAGED, lines
        assert name in lines[0], lines
        return
    assert run.bits is not None, f"hung: {run.codes} {run.said}"
    warned = [line for line in run.said[victim].splitlines() if line.startswith("warning: ") and f"{name} is damaged" in line]
    if not (warned and victim != "server"):
        assert [item for item in expected.keys() | run.bits.keys() if expected.get(item) != run.bits.get(item)] == []


def digit_at(data: bytes) -> int:
    """Return the place of a digit near the middle of a text: with another digit the file can still be read."""
    middle = len(data) // 2
    return min((at for at, byte in enumerate(data) if byte in b"123456789"), key=lambda at: abs(at - middle), default=middle)


@pytest.mark.parametrize(("archive", "side", "path", "where"), list(cases()), ids=lambda value: str(value))
def test_a_start_with_a_flipped_byte_ends_with_a_line_or_equal_bits(
    tmp_path: Path, undisturbed: Undisturbed, archive: str, side: str, path: str, where: str
) -> None:
    home, expected = undisturbed(archive)
    folder = tmp_path / archive
    shutil.copytree(home, folder)
    file = folder / side / path
    data = file.read_bytes()
    if where == "a digit":
        at = digit_at(data)
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 if data[at] != ord("1") else ord("3")]) + data[at + 1 :])
    else:
        file.write_bytes(flip(data, len(data) // 2))
    victim = "server" if side == "server" else "d0"
    names = file.parent.name if file.parent.name in ("ca", "identity") else "plan" if file.name == "plan.json" else file.name
    name = "" if file.name in WRITTEN_ANEW else names
    check(go_on(folder, victim == "d0", archive, file, data), victim, name, expected)
    shutil.rmtree(folder)


@pytest.mark.parametrize("table", TABLES)
def test_a_start_with_a_flipped_byte_in_a_table_ends_with_a_line_or_equal_bits(
    tmp_path: Path, undisturbed: Undisturbed, table: str
) -> None:
    home, expected = undisturbed("schema3")
    folder = tmp_path / "schema3"
    shutil.copytree(home, folder)
    database = folder / "server" / "state.sqlite"
    with closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    values = cells(database)
    content = database.read_bytes()
    database.write_bytes(flip(content, content.index(values[table]) + len(values[table]) // 2))
    for leftover in database.parent.glob("state.sqlite-*"):
        leftover.unlink()
    check(go_on(folder, False, "schema3"), "server", "state.sqlite", expected)
