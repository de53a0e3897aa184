"""Numbers for TensorBoard and MLflow are those of the run. Each test reads them back with the package itself."""

import sys

import pytest
from click.testing import CliRunner

from attune.common.errors import SettingError
from attune.contrib import publish
from attune.fedserver.home import ServerHome
from attune.simulation import compare
from tests.simulation.test_compare import saved


@pytest.fixture
def run(tmp_path):
    """Make a run of two devices at 0.5 and 0.75, of 40 test samples each, in one round of 2 and 3 seconds."""
    [found] = compare.read([f"mine={saved(tmp_path / 'saved', {'a': 0.5, 'b': 0.75})}"], ServerHome(tmp_path))
    return found


WANTED = {
    ("accuracy/before/mean_over_clients", 0): 0.625,
    ("accuracy/local/mean_over_clients", 1): 0.1,
    ("reports/seconds/train", 1): 2.5,
    ("reports/bytes_up/evaluate", 1): 1000.0,
}


def test_points_are_the_runs_numbers(run):
    found = {(point.name, point.round): point.value for point in publish.points(run)}
    assert {key: found[key] for key in WANTED} == pytest.approx(WANTED)


def test_tensorboard_reads_them(run, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = publish.to_tensorboard(run, tmp_path / "board")
    assert place == tmp_path / "board" / "mine"
    events = EventAccumulator(str(place))
    events.Reload()
    found = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert {key: found[key] for key in WANTED} == pytest.approx(WANTED)
    assert set(found) == {(point.name, point.round) for point in publish.points(run)}
    with pytest.raises(SettingError, match="is not empty"):
        publish.to_tensorboard(run, tmp_path / "board")


def test_mlflow_reads_them(run, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    number = publish.to_mlflow(run, uri)
    client = MlflowClient(tracking_uri=uri)
    assert client.get_run(number).data.params["method"] == "fedavg"
    for (name, round_), value in WANTED.items():
        assert {each.step: each.value for each in client.get_metric_history(number, name)}[round_] == pytest.approx(value)


def test_the_command_says_where_each_run_is(run, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "to_tensorboard", lambda run, folder: folder / run.name)
    monkeypatch.setattr(publish, "to_mlflow", lambda run, uri: "7")
    where = ["--tensorboard", "board", "--mlflow", "sqlite:///runs.db", "--home", str(tmp_path)]
    done = CliRunner().invoke(publish.publish, [*where, f"mine={run.path}"], catch_exceptions=False)
    assert done.output.splitlines() == ["mine: board/mine", "mine: run 7 in MLflow"]


@pytest.mark.parametrize(("package", "write"), [("mlflow", publish.to_mlflow), ("tensorboard", publish.to_tensorboard)])
def test_without_the_package_it_says_which(run, tmp_path, monkeypatch, package, write):
    for name in [name for name in sys.modules if name.startswith(("mlflow", "torch.utils.tensorboard", "tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingError, match=rf"pip install 'attune-fl\[{package}\]'"):
        write(run, tmp_path)
