"""Result of a simulation: a row for each device, the status, the models, the pictures, and files of all these."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from attune import seams
from attune.common.durable import PUBLIC, check_folder, write_file
from attune.common.errors import SettingError, nearest
from attune.common.methods.registry import configured_in
from attune.common.metrics import reported_by
from attune.common.plan import Plan
from attune.common.statistics import HelpOrHarm, Verdict, interval_of, shown_verdict
from attune.common.task import ScoredTask
from attune.common.text import aligned, csv_cell
from attune.fedclient.console import kept_words
from attune.fedclient.messages import OrderResult
from attune.fedclient.work.executor import SEQUENTIAL, STACKED, Executor, StackedExecutor
from attune.fedclient.work.processes.remote_executor import RemoteExecutor
from attune.fedserver.choosing.racing import DeviceScores, RaceResult, reported_scores
from attune.fedserver.core.fleet_verdict import FleetVerdict, effect_of, fleet_verdicts
from attune.fedserver.core.records import Arrival, arrivals_of
from attune.fedserver.view.status import status
from attune.simulation.federation import FederationOutcome
from attune.simulation.manifest import ResultManifest, result_manifest
from attune.simulation.result_table import BEST_OF, Cell, ResultTable, scores_of, text_of
from attune.simulation.simulation_state import SimulationState

if TYPE_CHECKING:
    from attune.common.pictures.figures import Section
    from attune.fedclient.model.artifact import Model


@dataclass(frozen=True)
class Pictures:
    """A page of pictures with their numbers."""

    title: str
    sections: Sequence[Section] = field(repr=False)

    def _repr_html_(self) -> str:
        """Return the page, for a notebook."""
        from attune.common.pictures import figures

        return figures.render(self.title, self.sections)

    def save(self, folder: str | Path) -> Path:
        """Write a PNG file for each picture, and index.html with all of them. Return the path of index.html."""
        from attune.common.pictures import figures

        return figures.write(Path(folder).expanduser(), self.title, self.sections)[-1]


class SimulationResult:
    """Result of a finished simulation."""

    def __init__(
        self, outcome: FederationOutcome, state: SimulationState, executor: Executor | None = None, data: str = ""
    ) -> None:
        self._outcome, self._state, self._executor, self._data = outcome, state, executor, data
        self.auto: RaceResult | None = None  # how `auto` chose the method, if it did
        self.rivals: Mapping[str, SimulationResult] = {}  # the other methods that `auto` trained to the end, by name

    def __repr__(self) -> str:
        facts = self.status
        return f"<SimulationResult of {facts['method']}, {facts['round']} rounds, {len(facts['clients'])} devices>"

    @cached_property
    def status(self) -> dict[str, Any]:
        """The object that `fedserver status --json` prints for such a federation."""
        return status(self._outcome.snapshot, set(self._outcome.reported), None, self._outcome.troubles)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The object that `fedserver export` writes as summary.json: accuracies by the protocols of both papers, curves."""
        from attune.fedserver.view.export import summarised

        return dict(msgspec.to_builtins(summarised(self._outcome.snapshot, self._plan)))

    @property
    def reports(self) -> dict[str, dict[str, Any]]:
        """The metrics of each device's last order, by name."""
        return {name: reported_by(result) for name, result in self._outcome.results.items()}

    def scores(self, round_: int) -> tuple[DeviceScores, DeviceScores, DeviceScores]:
        """Return what devices reported after this round, as `reported_scores`."""
        return reported_scores([row for row in self._outcome.snapshot.rows if (row.work, row.round) == ("evaluate", round_)])

    @property
    def arrivals(self) -> list[Arrival]:
        """The order of arrivals in buffered rounds, with which a SimulatedClock repeats this run."""
        snapshot = self._outcome.snapshot
        return arrivals_of(snapshot.rows, snapshot.devices, snapshot.record)

    @property
    def title(self) -> str:
        """The method for a table, with its preset unless that is the one for everyday use."""
        preset = self.summary["settings"].get("method.preset")
        return f"{self.summary['method']} ({preset})" if preset else str(self.summary["method"])

    @property
    def verdicts(self) -> list[FleetVerdict]:
        """Verdict on what devices keep against each rival with which they compared it (common.statistics.RIVAL_WORDS)."""
        return fleet_verdicts(self.reports)

    def table(self) -> DeviceTable:
        """Return a row for each device: its accuracies, and whether what it keeps is better than the others."""
        served, verdicts = self._served(), self.verdicts
        rows = sorted(self._outcome.results.items())
        return DeviceTable([_row_of(name, result, served[name], effect_of(verdicts, name)) for name, result in rows])

    @property
    def devices(self) -> list[str]:
        """Names of the devices that ended with a model, sorted."""
        return sorted(self._outcome.results)

    @property
    def task(self) -> ScoredTask:
        """Task of the federation."""
        return self._plan.scored

    @property
    def _plan(self) -> Plan:
        assert self._outcome.snapshot.plan is not None  # noqa: S101 (it is over, so it had one)
        return self._outcome.snapshot.plan

    def _served(self) -> dict[str, float | None]:
        """Return for each device the accuracy of what the server sends, before any training on the device.

        It is None if the server sends no model. Some evaluations do not measure it: of methods that are judged after training,
        with the dial, and with fine-tuning before prediction. Then it is the accuracy from which the last round of training
        began, or that of the common model.
        """
        method, results = configured_in(self._plan).method, self._outcome.results
        if set(method.kinds) == {"private"}:
            return dict.fromkeys(results)
        if method.predictor == "fine-tune":
            return {name: result.accuracy_common for name, result in results.items()}
        if method.evaluate == "trained" or self._plan.method_options.get("dial"):
            before = {client["name"]: client["before"] for client in self.summary["clients"]}
            return {name: before.get(name) for name in results}
        return {name: result.accuracy_before for name, result in results.items()}

    def model(self, name: str) -> Model:
        """Return the finished model of a device.

        Raises:
            SettingError: There is no such device.
        """
        if name not in self._outcome.results:
            raise SettingError(f"there is no device {name!r}{nearest(name, self._outcome.results)}")
        return self._state.model(name)

    def plot(self, *pictures: str) -> Pictures:
        """Return the pictures of `fedserver plot` with these names, or all that are possible.

        A notebook shows them; `save` writes them.

        Raises:
            SettingError: A picture is unknown, or not possible for this federation.
        """
        return Pictures(*seams.pictures_of(self._outcome.snapshot, self._state.storage.blobs, pictures))

    def report(self, out: str | Path, question: str = "") -> Path:
        """Write the page of `fedserver report` into the file `out`, and return its path."""
        return seams.write_report(Path(out).expanduser(), self._outcome.snapshot, self.status, question)

    @property
    def executor(self) -> str:
        """Name of the executor: "sequential", "stacked", "processes", "ray", or the name of a class."""
        if self._executor is None:
            return SEQUENTIAL
        if isinstance(self._executor, RemoteExecutor):
            return self._executor.name
        return STACKED if isinstance(self._executor, StackedExecutor) else type(self._executor).__name__

    @property
    def one_by_one(self) -> list[str]:
        """Reasons why the "stacked" executor did some work one by one, each reason once."""
        return self._executor.reasons if isinstance(self._executor, StackedExecutor) else []

    @property
    def digests(self) -> dict[str, str]:
        """Digests of all pieces of the server's state, by PART/KEY. Equal digests mean equal bits."""
        return {f"{slot.part}/{slot.key}": slot.digest for slot in self._outcome.snapshot.slots}

    @property
    def manifest(self) -> ResultManifest:
        """Circumstances of this result: versions, commit, machine, digest of the data, command, method and seed."""
        return result_manifest(self._data, self.summary["method"], self.summary["seed"], self.executor)

    @property
    def bytes_moved(self) -> int:
        """Bytes of models that all devices together sent and received, over all rounds."""
        return sum((row.bytes_up or 0) + (row.bytes_down or 0) for row in self._outcome.snapshot.rows)

    def save(self, folder: str | Path) -> Path:
        """Write the files of `fedserver export`, table.csv, status.json, manifest.json, and finished models in models/NAME.

        If `auto` chose the method, auto.json has all scores.

        Returns:
            The folder.

        Raises:
            SettingError: The folder cannot be written.
            DiskFull: The disk has no space left.
        """
        from attune.fedclient.model.model_info import save
        from attune.fedserver.view import export

        out, snapshot = Path(folder).expanduser(), self._outcome.snapshot
        check_folder(out, "folder")
        (out / "models").mkdir(parents=True, exist_ok=True)
        export.write_state(snapshot, self._state.storage.blobs, out)
        export.write_tables(snapshot, self._plan, out, self._outcome.reported, self._outcome.troubles)
        with (out / "table.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [column.name for column in fields(DeviceRow)])
            writer.writeheader()
            writer.writerows({name: csv_cell(value) for name, value in asdict(row).items()} for row in self.table())
        (out / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(self.manifest)) + b"\n")
        if self.auto is not None:
            write_file(out / "auto.json", msgspec.json.format(msgspec.json.encode(self.auto.report())), PUBLIC)
        for name in self._outcome.results:
            model = self.model(name)
            save(out / "models" / name, model.info, {kind: member.tensors for kind, member in model.members.items()})
        return out


@dataclass(frozen=True)
class DeviceRow:
    """One device's accuracies on its own test part.

    Accuracies are fractions, or None if there is no such model or no test part. In other tasks than classes they are R2 or
    label accuracy (common.task).

    Attributes:
        device: Name of the device.
        samples: Number of training samples.
        alone: Accuracy of the best ordinary model that the device fits alone, with scikit-learn.
        local: Accuracy of the network that the device trained alone.
        common: Accuracy of the model that all devices share.
        personalized: Accuracy of the device's own model.
        accuracy: Accuracy of the model that the method leads to, which is one of the last three.
        kept: Accuracy of what the device predicts with in the end: one of these models, or a blend of them.
        served: Accuracy of what the server sends, before any training on the device; None if it sends no model.
        constant: Accuracy of the constant answer that is best for the training part.
        interval: 95 % interval of `accuracy`; None for R2.
        verdict: Whether what the device keeps is better than the others.
        probably: Whether what the device keeps probably helps or harms it, from the evidence of all devices.
        keeps: What the device predicts with, in the words of `fedclient`: one model, or a blend with its weights.
    """

    device: str
    samples: int
    alone: float | None
    local: float | None
    common: float | None
    personalized: float | None
    accuracy: float | None
    kept: float | None
    served: float | None
    constant: float | None
    interval: tuple[float, float] | None
    verdict: Verdict | None
    probably: HelpOrHarm | None
    keeps: str


class DeviceTable(Sequence[DeviceRow]):
    """Rows of all devices, sorted by name."""

    def __init__(self, rows: Sequence[DeviceRow]) -> None:
        self._rows = tuple(rows)

    def __getitem__(self, at: Any) -> Any:
        return self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[DeviceRow]:
        return iter(self._rows)

    def __repr__(self) -> str:
        """Return an aligned table with a line of means at the end."""
        scores = self.scores()
        names = ["device", "samples", *scores, "interval", "verdict", "probably", "keeps"]
        rows = [
            (row.device, row.samples, *(getattr(row, name) for name in scores),
             row.interval and "{:.3f} to {:.3f}".format(*row.interval),
             row.verdict, row.probably, row.keeps)
            for row in self._rows
        ]  # fmt: skip
        means = ("mean", "", *map(self.mean, scores))
        return "\n".join(aligned([names, *([text_of(cell) for cell in row] for row in (*rows, means))]))

    def scores(self) -> list[str]:
        """Return the columns of scores, without those of models that no device has."""
        return scores_of(self)

    def mean(self, column: str) -> float | None:
        """Return the mean of a column of accuracies over the devices that have a value, or None if there are none."""
        values = [value for row in self._rows if (value := getattr(row, column)) is not None]
        return sum(values) / len(values) if values else None

    def formatted(self) -> ResultTable:
        """Return the table as it is written into files. The best model of each device, and on average, is in bold."""
        names = self.scores()
        rows: list[list[Cell]] = [
            [row.device, row.samples, *(getattr(row, name) for name in names), *(row.interval or (None, None)), row.verdict,
             row.probably, row.keeps]
            for row in self._rows
        ]  # fmt: skip
        means: list[Cell] = ["mean", None, *map(self.mean, names), None, None, None, None, None]
        heads = ("device", "samples", *names, "low", "high", "verdict", "probably", "keeps")
        return ResultTable(heads, [*rows, means], BEST_OF, "row")

    def to_csv(self) -> str:
        """Return the table as CSV, with a row of means."""
        return self.formatted().to_csv()

    def to_latex(self) -> str:
        """Return the table as a tabular of LaTeX with the rules of its package booktabs."""
        return self.formatted().to_latex()

    def to_html(self) -> str:
        """Return the table as a table element of HTML."""
        return self.formatted().to_html()

    _repr_html_ = to_html  # a notebook shows it

    def save(self, path: str | Path) -> Path:
        """Write the table into a file .csv, .tex or .html.

        Raises:
            SettingError: The file has another suffix, or cannot be written.
        """
        return self.formatted().save(path)

    def to_pandas(self) -> Any:
        """Return a DataFrame, in which the interval has two columns, low and high. Needs pandas."""
        import pandas

        rows = [asdict(row) | dict(zip(("low", "high"), row.interval or (None, None), strict=True)) for row in self._rows]
        return pandas.DataFrame(rows).drop(columns="interval").set_index("device")


def _row_of(name: str, result: OrderResult, served: float | None, probably: HelpOrHarm | None) -> DeviceRow:
    """Return a device's row, from the result of its last order."""
    accuracies, samples = result.accuracies, result.test_samples or 0
    accuracy = accuracies[result.own_choice]
    return DeviceRow(
        device=name,
        samples=result.samples,
        alone=accuracies.get("alone"),
        local=accuracies.get("local"),
        common=accuracies.get("common"),
        personalized=accuracies.get("personalized"),
        accuracy=accuracy,
        kept=result.accuracy,
        served=served,
        constant=result.accuracy_constant,
        interval=None if accuracy is None or not samples else interval_of(accuracy, samples, result.task),
        verdict=shown_verdict(msgspec.structs.asdict(result)),
        probably=probably,
        keeps=kept_words(result),
    )
