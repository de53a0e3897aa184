"""A backup that is made while rounds close, and the home that is restored from it."""

import json
import shutil
from pathlib import Path

import pytest

from attune.fedserver.home import ServerHome
from attune.fedserver.view.backup import back_up, damages
from tests.e2e.harness import Federation, FederationAt, tabular_shard, until

FLAGS = ("--method", "fedmcsa", "--model", "mlr", "--min-clients", "2", "--rounds", "20", "--set", "train.local_epochs=1")


def test_backups_beside_rounds_are_whole_and_one_goes_on_to_the_same_end(federation_at: FederationAt, tmp_path: Path) -> None:
    federation = federation_at("backup")
    shards = [tabular_shard(tmp_path / f"s{number}", number) for number in range(2)]
    server = federation.server("--exit-when-done", *FLAGS)
    # Slow devices leave time for all four backups, and cost no processor time.
    devices = [federation.device(shard, fault="*:*:training=sleep:0.1") for shard in shards]
    made = []
    for number in range(4):
        federation.await_status(lambda status, number=number: status["round"] >= 3 * number + 1)
        out = tmp_path / f"backup{number}"
        said = federation.command("fedserver", "backup", "--out", str(out)).stdout
        made.append((out, int(said.split("after ")[1].split()[0])))
    assert [device.code() for device in devices] == [0, 0]
    assert server.code() == 0
    assert len({closed for _, closed in made}) > 1
    final = federation.export()
    for out, closed in made:
        place = tmp_path / f"restored-{out.name}"
        said = federation.command("fedserver", "restore", "--from", str(out), "--home", str(place)).stdout
        assert f"is whole, after {closed} closed rounds" in said
        assert not list(damages(ServerHome(place)))
        assert {oct(path.stat().st_mode & 0o777) for path in place.rglob("*") if path.is_file()} <= {"0o600"}
    # The federation continues from the last backup, as after a lost disk: devices that are ahead follow.
    shutil.rmtree(federation.home)
    shutil.move(tmp_path / f"restored-{made[-1][0].name}", federation.home)
    again = federation.server("--exit-when-done")
    for shard in shards:
        federation.device(shard)
    assert again.code() == 0, again.text
    ended = federation.export()
    assert ended.keys() == final.keys()
    events = federation.command("fedserver", "audit").stdout
    assert "restored, by operator" in events and "each follows the one before" in events
    left = [path.name for path in federation.home.iterdir() if path.name.startswith(".backup-")]
    assert left == []


@pytest.fixture(scope="module")
def before_round_1(federation_at: FederationAt) -> Federation:
    """Back up a federation before its first round, which has all kinds of files except state."""
    federation = federation_at("small")
    server = federation.server("--method", "fedavg", "--min-clients", "9")
    federation.command("fedserver", "backup", "--out", str(federation.folder / "made"))
    server.stop()
    return federation


@pytest.fixture
def backed_up(before_round_1: Federation, tmp_path: Path) -> tuple[Federation, Path]:
    """Return the federation, and a copy of its backup that a test may damage."""
    return before_round_1, Path(shutil.copytree(before_round_1.folder / "made", tmp_path / "made"))


def test_answers_to_later_rounds_than_the_database_counts_stay_out(backed_up: tuple[Federation, Path], tmp_path: Path) -> None:
    """Allow for rounds that close between the copy of the database and the look into the inbox."""
    home = ServerHome(backed_up[0].home)
    for order in ("train-1-ada", "train-2-ada"):
        (home.path / "inbox" / order).mkdir(parents=True)
        (home.path / "inbox" / order / "update.json").write_bytes(b"{}")
    list(back_up(home, tmp_path / "later"))
    assert [path.name for path in (tmp_path / "later" / "inbox").iterdir()] == ["train-1-ada"]


@pytest.mark.parametrize("how", ["changed", "cut", "missing", "too much", "no manifest", "broken manifest", "other version"])
def test_a_damaged_backup_is_refused_by_name(backed_up: tuple[Federation, Path], tmp_path: Path, how: str) -> None:
    federation, made = backed_up
    victim, manifest = made / "state.sqlite", made / "MANIFEST.json"
    named = victim.name
    match how:
        case "changed":
            data = bytearray(victim.read_bytes())
            data[-1] ^= 1
            victim.write_bytes(data)
        case "cut":
            victim.write_bytes(victim.read_bytes()[:-1])
        case "missing":
            victim.unlink()
        case "too much":
            named = "more"
            (made / "more").write_text("?")
        case "no manifest":
            named = manifest.name
            manifest.unlink()
        case "broken manifest":
            named = manifest.name
            manifest.write_text("{")
        case "other version":
            named = "a newer version"
            manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 2}))
    place = tmp_path / "restored"
    done = federation.command("fedserver", "restore", "--from", str(made), "--home", str(place), code=4)
    assert named in done.stderr
    assert not place.exists()


def test_neither_a_backup_nor_a_home_is_written_over(backed_up: tuple[Federation, Path]) -> None:
    federation, made = backed_up
    assert "there already" in federation.command("fedserver", "backup", "--out", str(made), code=4).stderr
    refused = federation.command("fedserver", "restore", "--from", str(made), "--home", str(federation.home), code=4)
    assert "not empty" in refused.stderr
    until(lambda: (federation.home / "state.sqlite").exists(), "the old home to be as it was")
