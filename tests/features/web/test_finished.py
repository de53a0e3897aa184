"""A finished run: its home, and the simulation itself."""

import json
import re
import threading

import msgspec
import pytest

import attune
from attune.common.errors import SettingError
from attune.features.web.pages import of_home, show
from attune.features.web.parts import parts
from attune.features.web.prometheus import exposition
from attune.features.web.serving import PageAddress
from attune.fedserver.home import ServerHome
from tests.e2e.harness import tabular_shard, until
from tests.features.web.conftest import Page
from tests.homes.kept import EXPORTED, SAVED, unlisted


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Simulate four tables over three rounds of FedMCSA. Return the simulation's folder, and the folder of its results."""
    folder = tmp_path_factory.mktemp("run")
    shards = [tabular_shard(folder / f"site-{n}", seed=n, samples=30 + 8 * n) for n in range(4)]
    result = attune.simulate(shards, "fedmcsa", rounds=3, baseline="local", home=folder / "home", progress=False)
    return folder / "home" / "server", result.save(folder / "saved")


def test_the_home_of_a_finished_run_is_shown(run):
    shown = json.loads(msgspec.json.encode(parts(of_home(ServerHome(run[0])).look())))
    assert shown["run"]["kind"] == "home" and shown["run"]["state"] == "done"
    assert shown["run"]["disk_free_bytes"] > 0 and shown["run"]["needs_backup"]
    assert [line["answers"] for line in shown["rounds"]] == [4, 4, 4]
    assert all(device["stage"] == "finished" and device["verdict"] for device in shown["devices"])


def test_every_file_of_the_saved_folder_has_a_format(run):
    assert unlisted(run[1], EXPORTED, SAVED) == []


def test_the_matrix_is_the_stored_one_and_rows_sum_to_one(run):
    source = of_home(ServerHome(run[0]))
    mean = source.attention("")
    assert [sum(row) for row in mean.matrix] == pytest.approx([1] * 4, abs=1e-3)
    assert [source.attention(unit).unit for unit in ("", mean.units[1], "no such part")] == ["mean", mean.units[1], "mean"]


def test_a_folder_of_results_is_refused_in_words(run):
    with pytest.raises(SettingError, match=r"is a result and no home: `fedserver compare .* draws it"):
        show(ServerHome(run[1]), PageAddress(), print)


def test_the_command_serves_a_home_with_a_token(run):
    said = []
    threading.Thread(target=show, args=(ServerHome(run[0]), PageAddress(), said.append), daemon=True).start()
    until(lambda: said, "the command says where")
    port, token = re.fullmatch(r"dashboard http://127\.0\.0\.1:(\d+)/\?token=(\S+)", said[0]).groups()
    shown = json.loads(Page(int(port)).ask("/api/view", token=token).text)
    assert (shown["run"]["state"], shown["caller"]["actions"]) == ("done", [])


def test_a_simulation_is_watched_while_it_runs(tmp_path, capsys):
    shards = [tabular_shard(tmp_path / f"site-{n}", seed=n, samples=30) for n in range(2)]
    seen = []

    def look(share):
        found = re.search(r"dashboard http://127\.0\.0\.1:(\d+)/\?token=(\S+)", capsys.readouterr().err)
        if found and not seen:
            page = Page(int(found[1]))
            seen.append(json.loads(page.ask("/api/view", token=found[2]).text))
            seen.append(page.ask("/readyz").text)

    attune.simulate(shards, "fedavg", rounds=2, progress=look, dashboard=True)
    shown, ready = seen
    assert shown["run"]["kind"] == "simulation"
    assert shown["run"]["state"] == "training"
    assert {device["stage"] for device in shown["devices"]} <= {"waiting", "training", "sending"}
    assert sorted(shown["timeline"]) == [device["name"] for device in shown["devices"]]
    assert ready == "ok\n"


def test_a_page_that_shows_a_damaged_home_says_so(run, tmp_path, served):
    """Check that the stream goes on, with the last facts and the reason."""
    import shutil

    home = tmp_path / "home"
    shutil.copytree(run[0], home)
    source = of_home(ServerHome(home))
    page = served(source)
    database = home / "state.sqlite"
    database.write_bytes(b"x" * len(database.read_bytes()))
    (home / "state.sqlite-wal").unlink(missing_ok=True)
    answer = json.loads(page.ask("/api/view", token="a-token-of-tests").text)
    assert "database" in answer["lost"] or "damaged" in answer["lost"]


def test_metrics_of_a_finished_run(run):
    text = exposition(of_home(ServerHome(run[0])).look()).decode()
    assert 'attune_state{state="done"} 1.0' in text
    assert 'attune_answers_total{work="train"} 12.0' in text
    status = msgspec.json.decode((run[1] / "status.json").read_bytes())
    value = status["accuracy"]["mean_over_clients"]
    assert f'attune_accuracy{{average="mean_over_clients"}} {value}' in text
