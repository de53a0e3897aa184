"""Comparison of finished runs: each is a home, one of its earlier runs, or a folder of saved results."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import msgspec

from attune.common.errors import NoModel, SettingError
from attune.common.plan import run_name
from attune.common.statistics import finding, mcnemar
from attune.fedserver.core.accuracy import latest_metrics, mean_metrics
from attune.fedserver.core.records import Report
from attune.fedserver.home import ServerHome
from attune.fedserver.view.summary import Summary, read_rows, read_summary, summarise
from attune.simulation.over_seeds import FOLDER, SeedDifference, difference_over_seeds


class AgainstFirst(msgspec.Struct, frozen=True):
    """Comparison of a run with the first one, on the devices that both have: a sign test, in which each device counts once."""

    devices: int
    better: int
    worse: int
    p: float
    difference: float  # mean over these devices
    verdict: str  # better, worse or unclear


class OverSeeds(msgspec.Struct, frozen=True):
    """Runs of one name with several seeds.

    Attributes:
        name: The name of these runs.
        seeds: Their seeds.
        mean: Mean over seeds of the mean over the devices that all these runs have; None if there are none.
        deviation: Standard deviation over seeds of that mean.
        against_first: Comparison with the runs that have the name of the first run, on the devices that all of them have.
    """

    name: str
    seeds: list[int]
    mean: float | None
    deviation: float | None
    against_first: SeedDifference | None


class ComparedRun(msgspec.Struct, frozen=True):
    """Figures of one run.

    Accuracies are fractions, of the model by which the method is judged, and None if no device has reported one.
    """

    name: str
    path: str
    method: str
    model: str | None
    seed: int
    rounds: int
    closed: int
    devices: int
    mean_over_clients: float | None
    over_samples: float | None
    constant: float | None  # what constant answers reach, over clients
    fedtp: float | None
    fedmcsa: float | None
    verdicts: dict[str, int]  # better, worse, unclear: of how many devices
    gives: float | None  # what federation gives, mean over devices
    bytes: int
    slowest_s: float | None  # work of each round's slowest device, over all rounds
    metrics: dict[str, float]  # mean over devices of what each reported last, by name as in common.metrics
    against_first: AgainstFirst | None  # None: it is the first, or has no device in common with it
    over_seeds: OverSeeds | None = None  # of all runs with its name, if they are several

    @property
    def no_better(self) -> bool:
        """True if the run is no better than a constant answer, over clients."""
        mean, constant = self.mean_over_clients, self.constant
        return mean is not None and constant is not None and mean <= constant


class RunData(msgspec.Struct, frozen=True):
    """A run as it was read."""

    name: str
    path: str
    summary: Summary
    rows: list[Report]
    group: str = ""  # the name that it has in common with runs of other seeds; empty if it is alone

    @property
    def accuracies(self) -> dict[str, float]:
        """Accuracy of each device that has one."""
        return {client.name: client.accuracy for client in self.summary.clients if client.accuracy is not None}


def read(given: Sequence[str], place: ServerHome) -> list[RunData]:
    """Read runs, each given as `[NAME=]WHERE`: the name of a run of the home `place`, or else a folder.

    Write `./first` for a folder that has the name of a run. A folder with the results of several seeds is read as a run for
    each. Runs of one name with different seeds belong together.

    Raises:
        SettingError: It is something else, or two runs have one name and one seed.
        NoModel: A run has no closed round.
    """
    runs: list[RunData] = []
    for text in given:
        name, equals, where = text.partition("=")
        if not equals:
            name, where = "", text
        runs += _read(name, where, place)
    named: dict[str, list[RunData]] = {}
    for run in runs:
        named.setdefault(run.name, []).append(run)
    for name, of in named.items():
        if len({run.summary.seed for run in of}) < len(of):
            raise SettingError(f"two runs are called {name}: give each a name of its own, such as first={of[0].path}")
    return [
        msgspec.structs.replace(run, name=f"{run.name}/{FOLDER}{run.summary.seed}", group=run.name)
        if len(named[run.name]) > 1
        else run
        for run in runs
    ]


def _read(name: str, where: str, place: ServerHome) -> list[RunData]:
    path = _run_of(place, where)
    if path is None:
        path = Path(where).expanduser()
    else:
        name = name or unicodedata.normalize("NFC", where)
    if not path.is_dir():
        raise SettingError(f"{where} is neither a folder nor a run of {place.path} (`fedserver run list` names them)")
    return [_read_one(name or _called(path), one) for one in _folders(path)]


def _folders(path: Path) -> list[Path]:
    """Return the folder, or those of its seeds, if `simulate` has written it for several."""
    if ServerHome(path).exists() or (path / "summary.json").exists():
        return [path]
    seeds = [folder for folder in path.glob(f"{FOLDER}*") if folder.name.removeprefix(FOLDER).lstrip("-").isdecimal()]
    seeds.sort(key=lambda folder: int(folder.name.removeprefix(FOLDER)))
    return [folder / "server" if (folder / "server").is_dir() else folder for folder in seeds] or [path]


def _read_one(name: str, path: Path) -> RunData:
    home = ServerHome(path)
    if not home.exists():
        return RunData(name, str(path), read_summary(path), read_rows(path))
    snapshot = home.snapshot()
    if snapshot.plan is None or not snapshot.rows:
        raise NoModel(f"{path} has no rounds yet: there is nothing to compare before the first is closed")
    settings, closed = snapshot.settings, snapshot.record.round
    summary = summarise(snapshot.rows, settings, snapshot.plan.model.name, closed, snapshot.plan.scored)
    return RunData(name, str(path), summary, list(snapshot.rows))


def _run_of(place: ServerHome, name: str) -> Path | None:
    """Return the folder of a run of the home by its name; None if the home has none of this name."""
    if Path(name).name != name:
        return None
    name = unicodedata.normalize("NFC", name)  # the form of names of runs; some keyboards compose letters otherwise
    if ServerHome(place.runs / name).exists():
        return place.runs / name
    return place.path if place.exists() and run_name(place.snapshot().run) == name else None


def _called(path: Path) -> str:
    """Return the folder's name; for the server of a simulation, the name of the folder above it, which is the method's."""
    whole = path.resolve()
    return whole.parent.name if whole.name == "server" else whole.name


def compared(runs: Sequence[RunData]) -> list[ComparedRun]:
    """Compare runs with the first one; return them in the order given."""
    over_seeds = _over_seeds(runs)
    return [_compared(run, runs[0] if position else None, over_seeds.get(run.group)) for position, run in enumerate(runs)]


def _over_seeds(runs: Sequence[RunData]) -> dict[str, OverSeeds]:
    """Return the means of the runs of each name that has several, by the name."""
    named: dict[str, list[RunData]] = {}
    for run in runs:
        named.setdefault(run.group or run.name, []).append(run)
    first = next(iter(named.values()))
    return {name: _means(name, of, None if of is first else first) for name, of in named.items() if of[0].group}


def _means(name: str, runs: Sequence[RunData], first: Sequence[RunData] | None) -> OverSeeds:
    alone = list(_by_seed(runs, runs).values())
    against = None if first is None else difference_over_seeds(_by_seed(runs, first), _by_seed(first, runs))
    return OverSeeds(
        name,
        [run.summary.seed for run in runs],
        fmean(alone) if alone else None,
        stdev(alone) if alone else None,
        against,
    )


def _by_seed(runs: Sequence[RunData], others: Sequence[RunData]) -> dict[int, float]:
    """Return for each seed the mean accuracy of the devices that all runs and all others have; empty if there are none."""
    devices = set.intersection(*(set(run.accuracies) for run in (*runs, *others)))
    return {run.summary.seed: fmean(run.accuracies[name] for name in devices) for run in runs if devices}


def _compared(run: RunData, first: RunData | None, over_seeds: OverSeeds | None) -> ComparedRun:
    summary = run.summary
    latest = summary.latest.get("accuracy")
    gains = [client.gain for client in summary.clients if client.gain is not None]
    return ComparedRun(
        name=run.name,
        path=run.path,
        method=summary.method,
        model=summary.model,
        seed=summary.seed,
        rounds=summary.rounds,
        closed=summary.closed,
        devices=len(summary.clients),
        mean_over_clients=latest.mean_over_clients if latest else None,
        over_samples=latest.over_samples if latest else None,
        constant=summary.latest["constant"].mean_over_clients if "constant" in summary.latest else None,
        fedtp=summary.fedtp.mean if summary.fedtp else None,
        fedmcsa=summary.fedmcsa.mean_of_last if summary.fedmcsa else None,
        verdicts=dict(sorted(Counter(client.verdict for client in summary.clients if client.verdict).items())),
        gives=fmean(gains) if gains else None,
        bytes=sum((row.bytes_up or 0) + (row.bytes_down or 0) for row in run.rows),
        slowest_s=slowest(run.rows),
        metrics=mean_metrics(latest_metrics(run.rows).values()),
        against_first=against(run.accuracies, first.accuracies) if first else None,
        over_seeds=over_seeds,
    )


def against(accuracies: Mapping[str, float], first: Mapping[str, float]) -> AgainstFirst | None:
    """Compare accuracies by device of one run with those of the first."""
    both = sorted(accuracies.keys() & first.keys())
    if not both:
        return None
    differences = [accuracies[name] - first[name] for name in both]
    better, worse = sum(difference > 0 for difference in differences), sum(difference < 0 for difference in differences)
    p = mcnemar(better, worse)
    return AgainstFirst(len(both), better, worse, p, fmean(differences), finding(better, worse, p))


def slowest(rows: Sequence[Report]) -> float | None:
    """Return the seconds of the slowest device of each round and kind of work, summed; None if no device has reported any."""
    orders: dict[tuple[int, str], float] = {}
    for row in rows:
        if row.seconds is not None:
            key = row.round, row.work
            orders[key] = max(orders.get(key, 0.0), row.seconds)
    return sum(orders.values()) if orders else None
