"""The page for an operator: the federation's title, disk and backup, finished devices, and figures that stay."""

import time
from dataclasses import replace

import pytest
from click.testing import CliRunner

import attune
from attune.common.config import ServerSettings, convert
from attune.common.errors import SettingError
from attune.common.identity.credential import short_form
from attune.features.web.facts import CondensedReports, PageFacts
from attune.features.web.pages import of_home
from attune.features.web.parts import parts
from attune.fedserver.cli import cli
from attune.fedserver.core.messages import Phase, Record
from attune.fedserver.core.records import DeviceRecord, Report
from attune.fedserver.federation.streams import DeviceStage, Span
from attune.fedserver.home import ServerHome
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.homes import render_status
from attune.fedserver.view.status import status
from tests.e2e.harness import tabular_shard

SETTINGS = {"method": {"name": "fedavg"}, "round": {"rounds": 2}}


def report(client, work, number, accuracy):
    return Report(
        round=number, work=work, client=client, samples=40, accuracy_before=accuracy, test_samples=20, accuracy_local=0.5,
        accuracy_constant=0.3, better_than_local=9, worse_than_local=1,
    )  # fmt: skip


def finished(**revoked):
    """Return the end of a federation of three devices, of which "late" was away at the end."""
    devices = tuple(
        DeviceRecord(name, "key", since=1.0, contributed=1, revoked=revoked.get(name, False)) for name in ("ada", "ben", "late")
    )
    rows = [report(name, "train", number, 0.5) for number in (1, 2) for name in ("ada", "ben")]
    rows += [report("late", "train", 1, 0.4), report("ada", "evaluate", 2, 0.8), report("ben", "evaluate", 2, 0.6)]
    rows.sort(key=lambda row: (row.round, row.work != "train", row.client))
    return Snapshot(SETTINGS, None, Record(phase=Phase.DONE, round=2), devices, (), tuple(rows))


def facts_of(snapshot, spans=None):
    condensed = CondensedReports()
    condensed.add(snapshot.rows)
    return PageFacts("server", status(snapshot, set(), "here:1"), condensed.lines, condensed.totals, spans=spans or {})


def test_devices_that_have_their_model_are_finished_and_others_absent():
    spans = {"ada": (Span(DeviceStage.ABSENT, 1.0, "disconnected"),), "ben": (Span(DeviceStage.WAITING, 1.0),)}
    shown = {device["name"]: device for device in parts(facts_of(finished(), spans))["devices"]}
    assert {name: str(device["stage"]) for name, device in shown.items()} == {
        "ada": "finished", "ben": "finished", "late": "absent",
    }  # fmt: skip
    assert shown["ada"]["why"] == "has its model and has left"
    assert str({d["name"]: d for d in parts(facts_of(finished(ada=True)))["devices"]}["ada"]["stage"]) == "absent"


def test_status_and_dashboard_say_finished_of_the_same_devices():
    snapshot = finished()
    told = status(snapshot, set(), "here:1")
    shown = parts(facts_of(snapshot))["devices"]
    assert {client["name"]: client["state"] == "finished" for client in told["clients"]} == {
        device["name"]: str(device["stage"]) == "finished" for device in shown
    }
    assert "finished" in render_status(told)
    during = replace(snapshot, record=Record(phase=Phase.WAITING, round=1))
    assert {client["state"] for client in status(during, set(), "here:1")["clients"]} == {"disconnected"}


def test_a_revocation_after_the_end_changes_no_figure():
    before, after = status(finished(), set(), "here:1"), status(finished(ben=True), set(), "here:1")
    for key in ("accuracy", "constant", "no_better_than_constant", "fleet"):
        assert after[key] == before[key], key
    assert before["accuracy"]["mean_over_clients"] == pytest.approx(0.7)
    states = [client.pop("state") for client in after["clients"]]
    assert states == ["finished", "revoked", "disconnected"]
    assert [client | {"state": 0} for client in after["clients"]] == [client | {"state": 0} for client in before["clients"]]


def test_a_device_that_was_revoked_before_the_end_still_does_not_count():
    snapshot = finished(late=True)
    [late] = [client for client in status(snapshot, set(), "here:1")["clients"] if client["name"] == "late"]
    assert late["accuracy_local"] is None
    during = replace(snapshot, record=Record(phase=Phase.WAITING, round=1))
    assert "late" not in status(during, set())["no_better_than_constant"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operators")
    shards = [tabular_shard(folder / f"site-{n}", seed=n, samples=30) for n in range(2)]
    attune.simulate(shards, "fedavg", rounds=1, home=folder / "home", progress=False)
    home = ServerHome(folder / "home" / "server")
    home.open_authority()
    return home


async def test_the_page_says_which_federation_it_shows(home):
    run = parts(of_home(home).look())["run"]
    assert run["version"] == attune.__version__
    assert run["fingerprint"] == short_form((home.authority / "ca.pem").read_bytes())
    assert run["run"] == "first"
    assert run["name"] == "", "it has none yet"

    async with home.open() as storage:
        before = (await storage.ledger.snapshot()).overrides
        await storage.ledger.set_overrides(before | {"server": {"name": "Hospitals of the coast"}})
    assert parts(of_home(home).look())["run"]["name"] == "Hospitals of the coast"


@pytest.mark.parametrize("wrong", ["x" * 81, "a\nb", "\x1b[2J"])
def test_a_name_that_could_disturb_a_terminal_or_a_title_is_refused(wrong):
    with pytest.raises(SettingError, match=r"server\.name"):
        convert(ServerSettings, {"name": wrong}, "server.")


def test_disk_and_last_backup_are_on_the_page_and_in_metrics(home, tmp_path, served):
    from tests.features.web.conftest import TOKEN

    page = served(of_home(home))
    run = parts(of_home(home).look())["run"]
    assert run["disk_free_bytes"] > 0
    assert run["backup_at"] is None
    text = page.ask("/metrics", token=TOKEN).text
    assert "attune_disk_free_bytes " in text
    assert "attune_last_backup_seconds" not in text
    assert CliRunner().invoke(cli, ["backup", "--home", str(home.path), "--out", str(tmp_path / "copy")]).exit_code == 0
    assert parts(of_home(home).look())["run"]["backup_at"] == pytest.approx(time.time(), abs=60)
    time.sleep(0.6)  # the page may show what it read half a second ago
    assert "attune_last_backup_seconds " in page.ask("/metrics", token=TOKEN).text
