"""Summary of a federation: its accuracies by the protocols of both papers. Pure code, without torch.

State r is the state after r closed rounds; state 0 is untrained. All accuracies are fractions. Rounds of newcomers after the
last round count in the clients' figures, but in no curve.
"""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal, get_args

import msgspec

from attune.common.config import RoundSettings
from attune.common.errors import SettingError
from attune.common.methods.method import EvaluatedAs
from attune.common.metrics import Rival, within_bounds
from attune.common.statistics import HelpOrHarm, Verdict, shown_verdict, strongest
from attune.common.task import SCORED, ScoredTask
from attune.common.text import converted, from_json, newer_format
from attune.fedserver.core import accuracy as of_rows
from attune.fedserver.core.fleet_verdict import effect_of, fleet_verdicts, pooled_auroc
from attune.fedserver.core.planning import ResolvedSettings
from attune.fedserver.core.records import Report

FEDTP_EVERY = 5  # rounds from one evaluation to the next
FEDTP_LAST = Fraction(200, 1500)  # share of the rounds, at the end, whose evaluations count
FEDMCSA_LAST = 20  # evaluations

Curve = Literal["before", "after", "common", "local", "alone", "kept"]  # curves of accuracy by state
Figure = Literal["accuracy", "before", "after", "common", "local", "constant", "alone", "accuracy_kept"]  # of a client
ClientScores = dict[str, tuple[float, int]]  # client -> accuracy, and the size of its test part
Pick = Callable[[Report], tuple[int, float | None]]  # report -> state, and one of its accuracies


class Average(msgspec.Struct, frozen=True):
    """Both averages of an accuracy."""

    clients: int
    mean_over_clients: float  # FedMCSA's: every client counts the same
    over_samples: float  # FedTP's: every test sample counts the same


class CurvePoint(Average, frozen=True):
    """Averages for one state. `whole`: all devices were asked, and none is missing that is present before and after."""

    round: int
    whole: bool


class FedTP(msgspec.Struct, frozen=True):
    """FedTP's figure: accuracy over all test samples, averaged over the evaluations of the last rounds.

    They are those of every `every`-th of the `last` rounds and of the final round. `mean_over_clients` averages over clients.
    """

    every: int
    last: int
    evaluations: int
    mean: float
    deviation: float  # standard deviation of these evaluations
    mean_over_clients: float


class FedMCSA(msgspec.Struct, frozen=True):
    """FedMCSA's figures: the best mean over clients of all rounds (optimistic), and the mean of the last evaluations.

    `..._over_samples`: the same for the pooled accuracy, which the paper's tables print (erratum E7), with its own best round.
    """

    bmta: float
    bmta_round: int
    evaluations: int
    mean_of_last: float
    bmta_over_samples: float
    bmta_over_samples_round: int
    mean_of_last_over_samples: float


class ClientSummary(msgspec.Struct, frozen=True):
    """One client's latest figures.

    `before` and `after` are of its latest training; `constant` is the accuracy of a constant answer. All else is of its latest
    evaluation, in which it compared what it keeps with other models (common.statistics).
    """

    name: str
    test_samples: int
    accuracy: float | None  # of the model by which the method is judged
    before: float | None
    after: float | None
    common: float | None
    local: float | None
    kept: str | None
    constant: float | None = None
    own_accuracy: float | None = msgspec.field(default=None, name="own")  # of its own model
    alone: float | None = None  # of the best ordinary model that it fits alone
    accuracy_kept: float | None = None  # of what it keeps; `kept` is its name
    gain: float | None = None  # gain by federation
    gain_interval: tuple[float, float] | None = None
    rival: Rival | None = None  # the model that the gain is over
    verdict: Verdict | None = None
    probably: HelpOrHarm | None = None  # of what it keeps, from the evidence of the whole fleet
    auroc: dict[str, float] = {}  # what it reported of AUROC: the metrics of this name

    @property
    def compared(self) -> float | None:
        """The accuracy of the model that was compared: of what it keeps, or, of an earlier device, of its own model."""
        return self.own_accuracy if self.accuracy_kept is None else self.accuracy_kept

    @property
    def figures(self) -> dict[Figure, float | None]:
        """Figures by name."""
        return {name: getattr(self, name) for name in get_args(Figure)}


class Summary(msgspec.Struct, frozen=True):
    """summary.json."""

    method: str
    model: str | None
    seed: int
    rounds: int
    closed: int
    judged: Curve  # the curve by which the method is judged: "before" or "after" local training
    curves: dict[Curve, list[CurvePoint]]
    fedtp: FedTP | None  # None: all devices evaluated none of these states
    fedmcsa: FedMCSA | None
    latest: dict[Figure, Average]  # averages of the clients' latest figures
    kept: dict[str, int]  # number of clients that keep each kind of model
    clients: list[ClientSummary]
    settings: dict[str, Any]
    no_better_than_constant: list[str] = []  # clients whose model is no better than a constant answer
    task: ScoredTask = "classes"
    fleet: list[dict[str, Any]] = []  # what devices keep against each rival, as in status
    auroc: dict[str, Any] | None = None  # its pooled difference, as in status
    format: int = 1  # of all files of the folder

    @property
    def metric(self) -> str:
        """Name of the score."""
        return SCORED[self.task].metric


def summarise(
    rows: Sequence[Report], settings: ResolvedSettings, model: str | None, closed: int, task: ScoredTask = "classes"
) -> Summary:
    """Return the contents of summary.json. `rows` must be in the order of time."""
    evaluate, policy = settings.method.evaluate, settings.round
    by_name = curves(rows, evaluate, policy)
    judged: Curve = "before" if evaluate == "served" else "after"
    reports = of_rows.latest_metrics(rows)
    verdicts = fleet_verdicts(reports)
    listed = [msgspec.structs.replace(client, probably=effect_of(verdicts, client.name)) for client in clients(rows, evaluate)]
    return Summary(
        method=settings.method.name,
        model=model,
        seed=settings.seed,
        rounds=policy.rounds,
        closed=closed,
        judged=judged,
        curves=by_name,
        fedtp=fedtp(by_name[judged], policy),
        fedmcsa=fedmcsa(by_name[judged]),
        latest=averages(listed),
        kept=dict(sorted(Counter(client.kept for client in listed if client.kept).items())),
        clients=listed,
        settings=settings.fixed(),
        no_better_than_constant=of_rows.without_use(rows, of_rows.accuracies(rows, evaluate)),
        task=task,
        fleet=[verdict.report() for verdict in verdicts],
        auroc=pooled_auroc(reports.values()),
    )


def curves(rows: Iterable[Report], evaluate: EvaluatedAs, policy: RoundSettings) -> dict[Curve, list[CurvePoint]]:
    """Return the curves of accuracy by state: as served, after local training, of the other models and of what is kept.

    A device reports its accuracy with state r before it trains in round r + 1, and in an evaluation of state r. If both exist,
    the evaluation counts. If the method is judged by its trained models, an evaluation measures these.
    """
    rows = [row for row in rows if row.round <= policy.rounds]
    evaluations = [row for row in rows if row.work == "evaluate"]
    served = evaluations if evaluate == "served" else []
    trained = evaluations if evaluate == "trained" else []
    training = [row for row in rows if row.work == "train"]
    everyone_trains = not policy.clients or (policy.train == "all" and evaluate == "trained")

    def before(row: Report) -> tuple[int, float | None]:
        return row.round - (row.work == "train"), row.accuracy_before

    def after(row: Report) -> tuple[int, float | None]:
        return row.round, row.accuracy_after if row.work == "train" else row.accuracy_before

    return {
        "before": curve([*training, *served], before, everyone_trains),
        "after": curve([*training, *trained], after, everyone_trains),
        "common": curve(evaluations, lambda row: (row.round, row.accuracy_common), everyone_trains),
        "local": curve(evaluations, lambda row: (row.round, row.accuracy_local), everyone_trains),
        "alone": curve(evaluations, lambda row: (row.round, row.accuracy_alone), everyone_trains),
        "kept": curve(evaluations, lambda row: (row.round, row.accuracy_kept), everyone_trains),
    }


def curve(rows: Iterable[Report], pick: Pick, everyone_trains: bool) -> list[CurvePoint]:
    """Return a point for each state with a known accuracy. If a client has two rows for a state, the later one counts."""
    states: dict[int, ClientScores] = defaultdict(dict)
    asked: set[int] = set()
    for row in rows:
        state, value = pick(row)
        if value is not None and row.test_samples:
            states[state][row.client] = (value, row.test_samples)
            if everyone_trains or row.work == "evaluate":
                asked.add(state)
    seen: dict[str, list[int]] = defaultdict(list)
    for state in sorted(states):
        for client in states[state]:
            seen[client].append(state)
    points = []
    for state, scores in sorted(states.items()):
        missing = any(client not in scores and at[0] < state < at[-1] for client, at in seen.items())
        points.append(CurvePoint(**_averages(scores), round=state, whole=state in asked and not missing))
    return points


def fedtp(points: Iterable[CurvePoint], policy: RoundSettings) -> FedTP | None:
    """Return FedTP's figure over the states that all devices evaluated; None if there is none.

    Defaults for `evaluate_every` and `evaluate_last` are the paper's: every fifth round, and the last 200 of 1500 as a share.
    """
    every = policy.evaluate_every or FEDTP_EVERY
    last = policy.evaluate_last or math.ceil(policy.rounds * FEDTP_LAST)
    due = [
        point
        for point in points
        if point.whole and point.round > policy.rounds - last and (point.round % every == 0 or point.round == policy.rounds)
    ]
    if not due:
        return None
    pooled = [point.over_samples for point in due]
    return FedTP(every, last, len(due), fmean(pooled), pstdev(pooled), fmean(point.mean_over_clients for point in due))


def fedmcsa(points: Iterable[CurvePoint]) -> FedMCSA | None:
    """Return FedMCSA's BMTA (the first of equal rounds) and the mean of the last evaluations; None without a whole point."""
    due = [point for point in points if point.whole]
    if not due:
        return None
    best = max(due, key=lambda point: (point.mean_over_clients, -point.round))
    pooled = max(due, key=lambda point: (point.over_samples, -point.round))
    last = due[-FEDMCSA_LAST:]
    return FedMCSA(
        bmta=best.mean_over_clients,
        bmta_round=best.round,
        evaluations=len(last),
        mean_of_last=fmean(point.mean_over_clients for point in last),
        bmta_over_samples=pooled.over_samples,
        bmta_over_samples_round=pooled.round,
        mean_of_last_over_samples=fmean(point.over_samples for point in last),
    )


NOTHING = Report(round=0, work="evaluate", client="")  # of a client that has compared nothing


def clients(rows: Sequence[Report], evaluate: EvaluatedAs) -> list[ClientSummary]:
    """Return each client with an accuracy, by name."""
    accuracy = of_rows.accuracies(rows, evaluate)
    trained = {row.client: row for row in rows if row.work == "train" and row.accuracy_after is not None}
    compared, constants = of_rows.comparisons(rows), of_rows.constants(rows)

    def of(name: str) -> ClientSummary:
        training, comparison = trained.get(name), compared.get(name)
        value, samples = accuracy.get(name) or (None, (training.test_samples or 0) if training else 0)
        return ClientSummary(
            name=name,
            test_samples=samples,
            accuracy=value,
            before=training.accuracy_before if training else None,
            after=training.accuracy_after if training else None,
            constant=constants[name][0] if name in constants else None,
            **_compared(comparison or NOTHING),
        )

    too_few = {name for name, row in compared.items() if row.ranked and row.accuracy_before is None}
    return [of(name) for name in sorted(accuracy.keys() | trained.keys() | too_few)]


def _compared(row: Report) -> dict[str, Any]:
    """Return the fields of a `ClientSummary` that come from a comparison."""
    metrics = msgspec.structs.asdict(row)
    pair = strongest(metrics)
    gained = {} if pair is None else {"gain": pair.difference, "gain_interval": pair.interval(), "rival": pair.rival}
    areas = {name: value for name, value in metrics.items() if name.startswith("auroc_") and value is not None}
    others = {name: metrics[f"accuracy_{name}"] for name in ("common", "local", "alone")}
    kept = {"accuracy_kept": row.accuracy_kept, "kept": row.kept}
    return others | kept | {"own_accuracy": row.accuracy_before, "verdict": shown_verdict(metrics), "auroc": areas} | gained


def averages(listed: Sequence[ClientSummary]) -> dict[Figure, Average]:
    """Return the averages of each figure over the clients that have it."""
    by_figure: dict[Figure, ClientScores] = defaultdict(dict)
    for client in listed:
        for figure, value in client.figures.items():
            if value is not None and client.test_samples:
                by_figure[figure][client.name] = (value, client.test_samples)
    return {figure: Average(**_averages(by_figure[figure])) for figure in get_args(Figure) if figure in by_figure}


def _averages(scores: Mapping[str, tuple[float, int]]) -> dict[str, Any]:
    return {"clients": len(scores), **(of_rows.over_all(scores) or {})}


NOT_ONE = "{} is not a folder that `fedserver export` or Result.save wrote: {}"


def check_format(folder: Path) -> None:
    """Check that this version reads the files of an exported or saved run; summary.json has the format of all of them.

    Raises:
        SettingError: A newer version wrote them.
        OSError, msgspec.DecodeError: There is no summary.json.
    """
    path = folder / "summary.json"
    if newer := newer_format(path.read_bytes(), path, "fedserver"):
        raise SettingError(newer)


def read_summary(folder: Path) -> Summary:
    """Read summary.json of an exported or saved run.

    Raises:
        SettingError: The folder is no such run.
    """
    try:
        check_format(folder)
        return from_json((folder / "summary.json").read_bytes(), Summary)
    except (OSError, msgspec.DecodeError) as error:
        raise SettingError(NOT_ONE.format(folder, error)) from None


def read_rows(folder: Path) -> list[Report]:
    """Read metrics.csv of an exported or saved run, in the order of time.

    Raises:
        SettingError: The folder is no such run.
    """
    try:
        check_format(folder)
        with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
            rows = [row_of(line) for line in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError, csv.Error) as error:
        raise SettingError(NOT_ONE.format(folder, error)) from None
    return sorted(rows, key=lambda row: (row.round, row.work != "train", row.client))


def row_of(line: Mapping[str, str]) -> Report:
    """Return the report in a line of metrics.csv, in which an empty cell is None."""
    return within_bounds(converted({name: value for name, value in line.items() if value != ""}, Report, strict=False))
