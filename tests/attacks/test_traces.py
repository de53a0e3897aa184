"""A refused caller leaves a trace for the operator, and learns nothing of the server's files."""

from typing import Any

import msgspec
import pytest

from attune.common.errors import AttuneError, DiskFull, HomeMismatch, WireError
from attune.common.wire.digest import digest_of
from attune.fedserver.core.advice import BY_KIND, for_devices
from attune.fedserver.ports.blobs import Damaged
from tests.attacks.conftest import Victim
from tests.e2e.hand import PROFILE, Hand, kind_of, refusal
from tests.e2e.harness import Federation, FederationAt, Server, until


def told_of(victim: Victim, kind: str, who: str) -> dict[str, Any]:
    """Return the row of the status, once it is written."""

    def look() -> list[dict[str, Any]]:
        return [each for each in victim.federation.status()["refused"] if each["kind"] == kind and each["who"].startswith(who)]

    [found] = until(look, f"{who} to be among the refused")
    return dict(found)


def test_a_device_whose_data_do_not_fit_is_in_log_note_and_status_with_what_to_do(victim: Victim) -> None:
    log, mallory = victim.new_log(), victim.stranger()
    other = msgspec.structs.replace(PROFILE, shape=(4,))
    kind, message = refusal(mallory.connect(other).end)
    assert kind == "shape-mismatch"
    told = told_of(victim, kind, mallory.name)
    assert told["text"] == message and told["count"] == 1 and told["todo"] == BY_KIND[kind]
    until(lambda: told["todo"] in (victim.federation.client(mallory.name)["note"] or ""), "the note, which is written next")
    assert f"{mallory.name} was refused: {message}" in log() and told["todo"] in log()
    mallory.close()


def test_a_stranger_without_a_certificate_of_ours_is_told_by_its_address(victim: Victim) -> None:
    assert kind_of(lambda: victim.device("ada")) == "name-taken"
    assert kind_of(lambda: victim.device("\x1b[31m" + "x" * 200)) == "setting"
    assert told_of(victim, "name-taken", "ada from 127.0.0.1")["todo"]
    assert told_of(victim, "setting", " [31mxx")["who"].endswith("from 127.0.0.1")


def test_a_thousand_refusals_are_one_row_one_line_and_one_entry_of_the_audit_log(victim: Victim) -> None:
    log, mallory = victim.new_log(), victim.stranger()
    audit = victim.federation.home / "audit.jsonl"
    before = len(audit.read_bytes().splitlines())
    for _ in range(1000):
        assert kind_of(lambda: mallory.submit(f"train-1-{victim.devices['ada'].name}")) == "update-refused"
    told_of(victim, "update-refused", mallory.name)
    assert log().count(mallory.name) < 10
    assert len(audit.read_bytes().splitlines()) - before < 5
    mallory.close()


@pytest.fixture
def scene(federation_at: FederationAt) -> tuple[Federation, Server, list[Hand], Any]:
    federation = federation_at("scene")
    server = federation.server("--method", "fedavg", "--model", "mlr", "--min-clients", "2")
    hands = [Hand(server.port, server.join_token, name) for name in ("ada", "bob")]
    streams = [hand.connect() for hand in hands]
    return federation, server, hands, next(stream.next("order") for stream in streams)


def test_a_fault_of_the_server_names_none_of_its_paths_to_a_device(scene: Any) -> None:
    """Replace the folder of uploads by a file. The log has the traceback, because this error is not expected."""
    federation, server, (ada, _), order = scene
    uploads = federation.home / "uploads"
    for path in sorted(uploads.rglob("*"), reverse=True):
        path.rmdir()
    uploads.rmdir()
    uploads.write_text("")
    data = b"x" * 100
    part = order.returns[0].part
    kind, message = refusal(lambda: ada.upload(order.id, part, [data], digest_of(data), len(data)))
    assert (kind, str(federation.folder) in message) == ("error", False), message
    found = until(
        lambda: [each for each in federation.status()["refused"] if each["kind"] == "error"], "the operator to be told"
    )
    assert "NotADirectoryError" in found[0]["text"] and "report it" in found[0]["todo"]
    assert str(uploads) in server.text
    uploads.unlink()


def test_a_file_that_is_gone_is_not_named_to_the_device_that_asks_for_it(scene: Any) -> None:
    federation, _, (ada, _), order = scene
    for path in (federation.home / "state").glob("*.safetensors"):
        path.unlink()
    kind, message = refusal(lambda: ada.download(order.downloads[0].digest))
    assert (kind, "/" in message or "state" in message) == ("damaged", False), message


@pytest.mark.parametrize("error", [DiskFull, HomeMismatch, Damaged])
def test_errors_that_name_files_are_told_without_them(error: type[AttuneError]) -> None:
    told = for_devices(error("/home/ada/attune/server/state.sqlite is not what it was"))
    assert type(told) is error and "/" not in str(told)


@pytest.mark.parametrize("folder", ["/srv/attune/server/uploads/", "/home/ada b/my data/", "/x/"])
def test_other_errors_lose_the_folders_of_the_server(folder: str) -> None:
    error = WireError(f"{folder}eve.sha256-1.part has no header: update one of the two, or see attune/docs, 1/2 and 3 / 4 / 5")
    shown = for_devices(error)
    assert str(shown) == "eve.sha256-1.part has no header: update one of the two, or see attune/docs, 1/2 and 3 / 4 / 5"
    assert (type(shown), str(error).startswith(folder)) == (WireError, True), "the log keeps the whole name"
