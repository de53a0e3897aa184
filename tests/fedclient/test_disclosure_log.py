"""The log of what has left a device: what it counts, what a kill leaves of it, its size, and the command that shows it."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from attune.common.errors import DiskFull, HomeMismatch
from attune.common.exchange.messages import Beat, BlobRef, Hello, Progress, SecureMember, SecureMessage, Trouble, Update
from attune.common.pb import federation_pb2 as pb
from attune.fedclient.cli import main
from attune.fedclient.disclosure_log import (
    FILE,
    LONGEST_BYTES,
    LONGEST_SAMPLE,
    MOST_KINDS,
    OTHER,
    Disclosed,
    DisclosureLog,
    read_log,
)

SECRET = b"\x01tensors\x02"


def kinds(home: Path) -> dict[str, tuple[int, int]]:
    return {line.kind: (line.count, line.bytes) for line in read_log(home / FILE).messages}


def shown(home: Path) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["disclosed", "--home", str(home), "--json"])
    assert result.exit_code == 0, result.output
    shown: dict[str, Any] = json.loads(result.output)
    return shown


def test_the_log_has_every_message_and_every_byte_that_the_server_received(bench) -> None:
    bench.run()
    seen, noted = bench.server.seen, kinds(bench.folder / "home")
    assert noted["certificate request"][0] == len(seen.enrolled) == 1
    hellos = [pb.DeviceMessage(hello=hello).ByteSize() for hello in seen.hellos]
    assert noted["hello"] == (len(hellos), sum(hellos))
    trained = [update.ByteSize() for update in seen.submits if update.parts]
    others = [update.ByteSize() for update in seen.submits if not update.parts]
    assert (noted["update"], noted["report"]) == ((len(trained), sum(trained)), (len(others), sum(others)))
    blobs = [len(data) for parts in seen.blobs.values() for data in parts.values()]
    assert len(blobs) == 2 and noted["part shared"] == (2, sum(blobs))
    assert noted["question for a blob"][0] == len(seen.downloads)
    assert noted.get("progress", (0, 0))[0] == len(seen.progress)


def test_the_command_shows_the_numbers_of_the_last_message(bench) -> None:
    bench.run()
    noted = shown(bench.folder / "home")
    assert noted["format"] == 1 and noted["damaged_lines"] == 0
    profile = noted["messages"]["hello"]["sample"]["profile_json"]
    assert (profile["samples"], profile["labels"], profile["shape"]) == (40, ["ant", "bee", "cow"], [6])
    report = json.loads(bench.server.seen.submits[-1].metrics_json)
    assert noted["messages"]["report"]["sample"]["metrics_json"] == report
    lines = CliRunner().invoke(main, ["disclosed", "--home", str(bench.folder / "home")]).output
    assert f"last hello: {json.dumps(noted['messages']['hello']['sample'], separators=(',', ':'))}" in lines


def test_a_device_that_is_cut_off_has_noted_what_it_sent(bench) -> None:
    bench.run_until(lambda: bool(bench.server.seen.submits))
    assert kinds(bench.folder / "home")["update"][0] >= len(bench.server.seen.submits)


def test_a_kill_after_a_message_loses_signs_of_life_alone(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        log = DisclosureLog(tmp_path)
        log.note(Hello("test", b"{}"), 10)
        log.note(Beat(1.0), 3)
        log.note(Trouble("train-1", "no memory"), 20)
        log.note(Beat(1.0), 3)
        os._exit(9)
    os.waitpid(child, 0)
    assert kinds(tmp_path) == {"beat": (1, 3), "hello": (1, 10), "trouble": (1, 20)}


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_line_that_was_cut_off_costs_no_other_line(tmp_path: Path, cut: int) -> None:
    log = DisclosureLog(tmp_path)
    for _ in range(3):
        log.note(Trouble("train-1", "no memory"), 20)
    log.path.write_bytes(log.path.read_bytes()[:-cut])
    again = DisclosureLog(tmp_path)
    again.note(Hello("test", b"{}"), 10)
    again.note(Hello("test", b"{}"), 10)
    assert kinds(tmp_path) == {"hello": (2, 20), "trouble": (2 + (cut == 1), 40 + 20 * (cut == 1))}


def test_signs_of_life_are_counted_without_touching_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, syncs = DisclosureLog(tmp_path), list[int]()
    log.note(Hello("test", b"{}"), 10)
    before = log.path.stat()
    monkeypatch.setattr(os, "fsync", syncs.append)
    for _ in range(1000):
        log.note(Beat(1.0), 3)
        log.note(Progress("train-1", 0.5), 7)
    after = log.path.stat()
    assert (after.st_size, after.st_mtime_ns, syncs) == (before.st_size, before.st_mtime_ns, [])
    log.flush()
    assert kinds(tmp_path) == {"beat": (1000, 3000), "hello": (1, 10), "progress": (1000, 7000)} and syncs == []


def test_the_log_is_bounded_and_keeps_every_count(tmp_path: Path) -> None:
    log, wide = DisclosureLog(tmp_path), json.dumps({"labels": ["word" * 300] * 30, "columns": {"mean": [0.5] * 300}})
    for number in range(1000):
        log.note(Hello("test", wide.encode()), 10)
        log.note(Update(f"train-{number}", (BlobRef(f"part{number % 200}", "sha256:0", 5, data=SECRET),), 40), 100)
        assert log.path.stat().st_size < LONGEST_BYTES + 3 * LONGEST_SAMPLE
    content = read_log(log.path)
    assert len(content.messages) <= MOST_KINDS + 1 and OTHER in kinds(tmp_path)
    assert sum(line.count for line in content.messages) == 3000
    assert sum(line.bytes for line in content.messages) == 1000 * 110
    assert all(len(json.dumps(line.sample)) <= LONGEST_SAMPLE * 1.2 for line in content.messages)


def test_the_log_holds_neither_tensors_nor_keys(tmp_path: Path) -> None:
    log = DisclosureLog(tmp_path)
    log.note(Update("train-1", (BlobRef("shared", "sha256:0", len(SECRET), data=SECRET),), 40, b'{"loss": 0.5}'), 100)
    member = SecureMember("kiel", b"mask key", b"share key", b"certificate", b"signature", b"a secret share")
    log.note(SecureMessage("train-1", 1, "shares", (member,)), 90)
    text = log.path.read_text()
    assert "tensors" not in text and "a secret share" not in text and "mask key" not in text
    assert '"loss":0.5' in text and kinds(tmp_path)["secure aggregation: shares"] == (1, 90)


@pytest.mark.parametrize("at", ["certificate request", "hello", "question for a blob", "part shared", "update", "report"])
def test_what_cannot_be_noted_is_not_sent_and_ends_the_device(bench, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    appended, begun = DisclosureLog._append, list[str]()

    def full(log: DisclosureLog, *lines: Disclosed) -> None:
        begun.extend(line.kind for line in lines)
        if at in begun:  # from then on
            raise OSError(errno.ENOSPC, "No space left on device", str(log.path))
        appended(log, *lines)

    monkeypatch.setattr(DisclosureLog, "_append", full)
    with pytest.raises(OSError, match="No space left on device"):
        bench.run()
    seen = bench.server.seen
    sent = {
        "certificate request": seen.enrolled, "hello": seen.hellos, "question for a blob": seen.downloads,
        "part shared": [blob for parts in seen.blobs.values() for blob in parts],
        "update": [update for update in seen.submits if update.parts],
        "report": [update for update in seen.submits if not update.parts],
    }  # fmt: skip
    assert not sent[at]


def test_a_log_that_cannot_be_shortened_is_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DisclosureLog(tmp_path).note(Hello("test", b"{}"), 10)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes() + b'{"torn')

    def full(*rest: Any) -> Any:
        raise DiskFull("no space left on device")

    monkeypatch.setattr("attune.fedclient.disclosure_log.write_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        DisclosureLog(tmp_path).note(Hello("test", b"{}"), 10)


def test_a_log_of_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"format":2,"since":1.0}\n')
    (tmp_path / "device.json").write_text('{"name":"kiel","server":"localhost:1"}')
    result = CliRunner().invoke(main, ["disclosed", "--home", str(tmp_path)])
    assert result.exit_code == HomeMismatch.exit_code and "update fedclient" in result.output
    with pytest.raises(HomeMismatch):
        DisclosureLog(tmp_path).note(Hello("test", b"{}"), 10)


def test_the_request_of_join_moves_to_the_devices_home(bench) -> None:
    server = f"127.0.0.1:{bench.server.port}"
    joined = CliRunner().invoke(main, ["join", "--server", server, "--token", bench.server.token(), "--name", "kiel"])
    assert joined.exit_code == 0, joined.output
    bench.run(home=None, token=None)
    result = CliRunner().invoke(main, ["disclosed", "--data", str(bench.shard), "--server", server, "--json"])
    assert json.loads(result.output)["messages"]["certificate request"]["count"] == 1
    [place] = (bench.folder / "attune" / "devices").glob(f"*/*/{FILE}")
    assert stat.S_IMODE(place.stat().st_mode) == 0o600, "it says what data the device has"


def test_a_log_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"format":1,"since":1.0}\n')
    (tmp_path / FILE).chmod(0o644)
    DisclosureLog(tmp_path).note(Hello("test", b"{}"), 10)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_a_home_without_a_log_says_so(tmp_path: Path) -> None:
    (tmp_path / "device.json").write_text('{"name":"kiel","server":"localhost:1"}')
    assert "nothing has left" in CliRunner().invoke(main, ["disclosed", "--home", str(tmp_path)]).output
