"""Results of one simulation with several seeds: means, deviations, and a paired test between two methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import msgspec

from attune.common.durable import check_folder
from attune.common.errors import SettingError
from attune.common.statistics import Finding, finding, holm, interval_of_mean, student_p
from attune.simulation.result_table import BEST_OF, SCORES, ResultTable, scores_of, spread_of

if TYPE_CHECKING:
    from attune.simulation.result import SimulationResult

FEWEST_SEEDS = 3  # below, a deviation over seeds is known too badly for a claim
ALIKE = 1e-12  # differences over seeds that deviate by less are equal
FOLDER = "seed-"  # the folder of a seed's results begins with it


class SeedDifference(msgspec.Struct, frozen=True):
    """Paired comparison of two methods over the seeds that both have, by Student's t on the differences of their means.

    It estimates the mean difference over these devices, with these shards, that other seeds would give. It says nothing
    about other devices.

    Attributes:
        seeds: Number of seeds.
        difference: Mean over seeds of the difference of the means over devices.
        deviation: Standard deviation of the difference over seeds; None with one seed.
        interval: 95 % interval of the difference; None below FEWEST_SEEDS, and if no seed differs from another one.
        p: The p-value of "no difference"; None where there is no interval.
        verdict: The finding; None below FEWEST_SEEDS, where nothing is claimed.
    """

    seeds: int
    difference: float
    deviation: float | None
    interval: tuple[float, float] | None
    p: float | None
    verdict: Finding | None

    def words(self, name: str, first: str, methods: int = 1) -> str:
        """Return the comparison of the method `name` with the method `first` as a sentence; `methods` share the correction."""
        deviation = "" if self.deviation is None else f" ± {self.deviation:.4f}"
        known = f"{name} against {first}: {self.difference:+.4f}{deviation} over {self.seeds} seeds on these devices"
        if self.verdict is None:
            return f"{known}: no claim below {FEWEST_SEEDS} seeds"
        if self.interval is None or self.p is None:
            return f"{known}: no claim, because all seeds give the same difference"
        certain = {"better": "better", "worse": "worse", "unclear": "not certainly different"}[self.verdict]
        low, high = self.interval
        test = f"paired t-test over seeds, p = {self.p:.2g}{f' by Holm for {methods} methods' if methods > 1 else ''}"
        return f"{known}, 95 % {low:+.4f} to {high:+.4f}: {certain} ({test})"


def difference_over_seeds(means: Mapping[int, float], first: Mapping[int, float]) -> SeedDifference | None:
    """Compare means over devices by seed with those of another method; None without a common seed."""
    both = sorted(means.keys() & first.keys())
    if not both:
        return None
    differences = [means[seed] - first[seed] for seed in both]
    mean, deviation = fmean(differences), stdev(differences) if len(both) > 1 else None
    if deviation is None or len(both) < FEWEST_SEEDS:
        return SeedDifference(len(both), mean, deviation, None, None, None)
    if deviation < ALIKE:  # a t-test needs a deviation
        return SeedDifference(len(both), mean, deviation, None, None, "unclear")
    p = student_p(mean / deviation * len(both) ** 0.5, len(both) - 1)
    return SeedDifference(len(both), mean, deviation, interval_of_mean(differences), p, finding(mean, 0.0, p))


def against_first(results: Mapping[str, SeedResults]) -> dict[str, SeedDifference]:
    """Compare what devices keep by each method with the first one; the p-values are adjusted by Holm for all of them."""
    means = {name: of.means() for name, of in results.items()}
    first = means.pop(next(iter(results)))
    compared = {name: difference_over_seeds(of, first) for name, of in means.items()}
    known = {name: difference for name, difference in compared.items() if difference is not None}
    adjusted = holm({name: difference.p for name, difference in known.items() if difference.p is not None})
    for name, p in adjusted.items():
        known[name] = msgspec.structs.replace(known[name], p=p, verdict=finding(known[name].difference, 0.0, p))
    return known


class SeedResults(Mapping[int, "SimulationResult"]):
    """Result of each seed, by the seed, in the order in which they were given."""

    def __init__(self, results: Mapping[int, SimulationResult]) -> None:
        self._results = dict(results)

    def __getitem__(self, seed: int) -> SimulationResult:
        return self._results[seed]

    def __iter__(self) -> Iterator[int]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    def __repr__(self) -> str:
        """Return the table."""
        return repr(self.table())

    def _repr_html_(self) -> str:
        """Return the table, for a notebook."""
        return self.table().to_html()

    @property
    def devices(self) -> list[str]:
        """Names of the devices that ended with a model for every seed, sorted."""
        return sorted(set.intersection(*(set(result.devices) for result in self.values())))

    def means(self, column: str = "kept") -> dict[int, float]:
        """Return for each seed the mean of a column over the devices. Seeds without a value are absent.

        Args:
            column: A column of accuracies of `SimulationResult.table()`.

        Raises:
            SettingError: There is no such column.
        """
        if column not in SCORES:
            raise SettingError(f"there is no column {column!r} of accuracies; choose one of {', '.join(SCORES)}")
        known = {seed: result.table().mean(column) for seed, result in self.items()}
        return {seed: mean for seed, mean in known.items() if mean is not None}

    def against(self, other: SeedResults, column: str = "kept") -> SeedDifference:
        """Compare with another method that ran with the same seeds on the same shards. A positive difference is for this one.

        Raises:
            SettingError: They have no seed in common, or other devices, or no device has a test part.
        """
        if self.devices != other.devices:
            raise SettingError("these results are of other devices: simulate both methods on the same shards")
        compared = difference_over_seeds(self.means(column), other.means(column))
        if compared is None:
            raise SettingError(
                f"these results have no seed in common with a value of {column!r}: simulate both with the same seeds"
            )
        return compared

    def table(self) -> ResultTable:
        """Return a row for each device with its accuracies, mean and deviation over seeds, and then a row of the means.

        The deviation of the last row is that of the mean over devices.
        """
        tables = [result.table() for result in self.values()]
        by_seed = [{row.device: row for row in table} for table in tables]
        figures = scores_of([row for table in tables for row in table])
        rows = [
            [device, by_seed[0][device].samples, *(spread_of(getattr(of[device], name) for of in by_seed) for name in figures)]
            for device in self.devices
        ]
        means = [spread_of(table.mean(name) for table in tables) for name in figures]
        return ResultTable(("device", "samples", *figures), [*rows, ["mean", None, *means]], BEST_OF, "row")

    def save(self, folder: str | Path) -> Path:
        """Write the files of `SimulationResult.save` for each seed into seed-N, and table.csv beside these folders.

        Returns:
            The folder.

        Raises:
            SettingError: The folder cannot be written.
            DiskFull: The disk has no space left.
        """
        out = Path(folder).expanduser()
        check_folder(out, "folder")
        for seed, result in self.items():
            result.save(out / f"{FOLDER}{seed}")
        self.table().save(out / "table.csv")
        return out


def run_seeds(seeds: Sequence[int], home: Path | None, run: Callable[[int, Path | None], SimulationResult]) -> SeedResults:
    """Run a simulation for each seed. With a home, each has the folder seed-N in it.

    Raises:
        SettingError: There is no seed, or one is no whole number, or comes twice.
    """
    if isinstance(seeds, (str, Integral)) or not all(
        isinstance(seed, Integral) and not isinstance(seed, bool) for seed in seeds
    ):
        raise SettingError(f"seeds are whole numbers, such as (0, 1, 2), not {seeds!r}")
    listed = [int(seed) for seed in seeds]
    if not listed or len(set(listed)) < len(listed):
        raise SettingError(f"seeds are at least one number, and each comes once, since it gives the same bits; not {seeds!r}")
    return SeedResults({seed: run(seed, None if home is None else home / f"{FOLDER}{seed}") for seed in listed})
