"""`fedserver publish`: a run's numbers for TensorBoard and MLflow.

They are the curves of its accuracies, and the means of all that devices report.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from attune.common.command_group import FOLDER
from attune.common.errors import SettingError
from attune.fedserver.cli.shared import HOME, place_of

if TYPE_CHECKING:
    from attune.simulation.compare import RunData

EXPERIMENT = "attune"
BATCH = 1000  # metrics in one call, as many as MLflow takes


@click.command()
@HOME
@click.argument("runs", nargs=-1, metavar="[NAME=]RUN...")
@click.option("--tensorboard", type=FOLDER, metavar="DIR", help="A folder of event files.")
@click.option("--mlflow", metavar="URI", help="A tracking server, or a database: sqlite:///runs.db.")
def publish(home: Path | None, runs: tuple[str, ...], tensorboard: Path | None, mlflow: str | None) -> None:
    """Write the curves of runs for TensorBoard or MLflow: of this home, or of those named as for `compare`."""
    if tensorboard is None and mlflow is None:
        raise click.UsageError("Missing option '--tensorboard' or '--mlflow'.")
    from attune.simulation.compare import read

    place = place_of(home)
    for run in read(runs or (str(place.path),), place):
        if tensorboard is not None:
            click.echo(f"{run.name}: {to_tensorboard(run, tensorboard)}")
        if mlflow is not None:
            click.echo(f"{run.name}: run {to_mlflow(run, mlflow)} in MLflow")


class LoggedValue(NamedTuple):
    """One number of a curve, as TensorBoard and MLflow take it."""

    name: str
    value: float
    round: int


def points(run: RunData) -> Iterator[LoggedValue]:
    """Yield `accuracy/CURVE/AVERAGE` as in summary.json, and `reports/METRIC/WORK`, the mean over devices."""
    for curve, curve_points in run.summary.curves.items():
        for point in curve_points:
            yield LoggedValue(f"accuracy/{curve}/mean_over_clients", point.mean_over_clients, point.round)
            yield LoggedValue(f"accuracy/{curve}/over_samples", point.over_samples, point.round)
    from attune.common.metrics import reported_by

    reports: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for row in run.rows:
        for metric, value in reported_by(row).items():
            if isinstance(value, int | float):
                reports[metric, row.work, row.round].append(value)
    for (metric, work, number), values in sorted(reports.items()):
        yield LoggedValue(f"reports/{metric}/{work}", sum(values) / len(values), number)


def to_tensorboard(run: RunData, folder: Path) -> Path:
    """Write event files into `folder/NAME`, and return that folder.

    Raises:
        SettingError: TensorBoard is not installed, or there are files already.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise _missing("tensorboard") from None
    place = folder / run.name
    if place.exists() and any(place.iterdir()):
        raise SettingError(f"{place} is not empty: TensorBoard would show two runs as one; name another folder")
    with SummaryWriter(str(place)) as writer:
        writer.add_text("settings", _table(run.summary.settings))
        for point in points(run):
            writer.add_scalar(point.name, point.value, point.round)
    return place


def to_mlflow(run: RunData, uri: str) -> str:
    """Write a run of the experiment `attune` at the tracking server, file or database `uri`, and return its id.

    Raises:
        SettingError: MLflow is not installed, or does not take the run.
    """
    try:
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    except ImportError:
        raise _missing("mlflow") from None
    try:
        client = MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(EXPERIMENT)
        number = experiment.experiment_id if experiment else client.create_experiment(EXPERIMENT)
        made = str(client.create_run(number, run_name=run.name).info.run_id)
        now = int(time.time() * 1000)
        settings = [Param(name, str(value)) for name, value in run.summary.settings.items()]
        client.log_batch(made, params=[*settings, Param("method", run.summary.method), Param("model", str(run.summary.model))])
        metrics = [Metric(point.name, point.value, now, point.round) for point in points(run)]
        for at in range(0, len(metrics), BATCH):
            client.log_batch(made, metrics=metrics[at : at + BATCH])
        client.set_terminated(made)
    except (MlflowException, OSError) as error:
        raise SettingError(f"MLflow at {uri} does not take the run {run.name}: {error}") from None
    return made


def _missing(package: str) -> SettingError:
    return SettingError(f"this needs {package}, which is not installed: pip install 'attune-fl[{package}]'")


def _table(settings: dict[str, Any]) -> str:
    """Return Markdown, which TensorBoard shows as a table."""
    return "\n".join(["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in settings.items())])
