"""The audit log: chained, with changes detected, and whole after a process was killed in the middle of a line."""

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attune.common import faults
from attune.common.errors import HomeMismatch
from attune.fedserver.stores.audit import FIRST, Audit, entries

WRITE = "import sys; from pathlib import Path; from attune.fedserver.stores.audit import Audit; "
WRITE += "Audit(Path(sys.argv[1])).write('device revoked', 'a test', name='x' * 50)"


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    return Audit(tmp_path / "audit.jsonl")


def events(audit: Audit) -> list[str]:
    return [entry.event for entry, _ in entries(audit.path)]


def test_every_line_names_the_digest_of_the_one_before(audit: Audit) -> None:
    audit.write("enrolled", "device", name="ada", token="1f")
    audit.write("settings", "operator eve", changed={"round.rounds": [40, 50]})
    lines = audit.path.read_bytes().splitlines()
    first, second = (msgspec.json.decode(line) for line in lines)
    assert (first["number"], first["previous"], first["facts"]) == (1, FIRST, {"name": "ada", "token": "1f"})
    assert (second["number"], second["previous"]) == (2, hashlib.sha256(lines[0]).hexdigest())
    assert [digest for _, digest in entries(audit.path)] == [hashlib.sha256(line).hexdigest() for line in lines]
    assert audit.path.stat().st_mode & 0o777 == 0o600


def test_there_is_no_log_before_the_first_event(audit: Audit) -> None:
    assert events(audit) == []


@given(st.integers(0, 4), st.sampled_from(["changed", "taken out", "put in", "swapped"]))
def test_a_line_that_was_changed_taken_out_or_put_in_is_named(
    tmp_path_factory: pytest.TempPathFactory, at: int, how: str
) -> None:
    audit = Audit(tmp_path_factory.mktemp("audit") / "audit.jsonl")
    for number in range(6):
        audit.write("enrolled", "device", name=f"d{number}")
    lines = audit.path.read_bytes().splitlines(keepends=True)
    match how:
        case "changed":
            lines[at] = lines[at].replace(b'"d', b'"e')
        case "taken out":
            del lines[at]
        case "put in":
            lines.insert(at, lines[at])
        case "swapped":
            lines[at], lines[at + 1] = lines[at + 1], lines[at]
    audit.path.write_bytes(b"".join(lines))
    with pytest.raises(HomeMismatch, match=rf"line ({at + 1}|{at + 2}): "):
        list(entries(audit.path))


def test_a_process_that_was_killed_in_the_middle_of_a_line_leaves_a_log_that_goes_on(audit: Audit) -> None:
    audit.write("enrolled", "device", name="ada")
    environment = os.environ | {faults.VARIABLE: "server:0:audit-half=kill"}
    killed = subprocess.run([sys.executable, "-c", WRITE, audit.path], env=environment, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    torn = audit.path.read_bytes().splitlines()[1]
    assert torn and not audit.path.read_bytes().endswith(b"\n")
    assert events(audit) == ["enrolled"], "what was never whole never counted"
    audit.write("device revoked", "operator eve", name="bob")
    assert events(audit) == ["enrolled", "cut off", "device revoked"]
    [cut] = [entry for entry, _ in entries(audit.path) if entry.event == "cut off"]
    assert cut.facts == {"unfinished": torn.decode()}


@pytest.mark.parametrize("length", [1 << 15, (1 << 16) - 200, 1 << 16, 1 << 18])
def test_a_line_may_be_of_any_length_and_the_next_follows_it(audit: Audit, length: int) -> None:
    """Use long settings: the names of a table's columns, which the operator declares, are one."""
    audit.write("enrolled", "device", name="ada")
    audit.write("settings", "operator eve", changed={"data.columns": [None, ["x" * length]]})
    with audit.path.open("ab") as file:
        file.write(b"y" * length)
    audit.write("enrolled", "device", name="bob")
    assert events(audit) == ["enrolled", "settings", "cut off", "enrolled"]


def test_many_writers_make_one_chain(audit: Audit) -> None:
    def write(who: str) -> None:
        for number in range(10):
            Audit(audit.path).write("enrolled", who, name=f"d{number}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, (f"w{number}" for number in range(4))))
    assert sorted({entry.by for entry, _ in entries(audit.path)}) == ["w0", "w1", "w2", "w3"]
    assert len(events(audit)) == 40


def test_threads_of_one_process_write_one_after_the_other(tmp_path):
    """Many refusals are noted at once: a half of one line must not be taken for a line that a killed process left."""
    audit = Audit(tmp_path / "audit.jsonl")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: audit.write("refused", "a test", who=f"n{number}-{'z' * 200}"), range(200)))
    assert [entry.number for entry, _ in entries(audit.path)] == list(range(1, 201))
