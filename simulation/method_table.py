"""The table of `fedserver simulate --seeds`, and the file of `--table`: methods side by side, with deviations over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attune.common.task import TASKS
from attune.fedserver.core.candidates import ComparedMethod
from attune.simulation.comparison_table import COLUMN_NOTES, model_lines
from attune.simulation.over_seeds import SeedResults, difference_over_seeds
from attune.simulation.result import DeviceRow, DeviceTable
from attune.simulation.result_table import Cell, ResultTable, spread_of

FIGURES = {"kept": "kept", "own": "accuracy", "served": "served"}  # heads -> columns of a device


def comparison_over_seeds(methods: Sequence[ComparedMethod], results: Mapping[str, SeedResults]) -> list[str]:
    """Return the lines of the table: for each device a row for each method, the means, and the tests over seeds.

    Args:
        methods: The methods, in the order of the table.
        results: Results of each method.
    """
    by_seed = {name: [{row.device: row for row in one.table()} for one in of.values()] for name, of in results.items()}
    devices = sorted(set.intersection(*(set(of.devices) for of in results.values())))
    rows: list[list[Cell]] = []
    for device in devices:
        for name, tables in by_seed.items():
            listed = [rows_of[device] for rows_of in tables]
            rows.append([device, listed[0].samples, name, *_figures(listed)])
    rows += [["mean", None, name, *_means([one.table() for one in of.values()])] for name, of in results.items()]
    table = ResultTable(("device", "samples", "method", *FIGURES), rows)
    firsts = {name: next(iter(of.values())) for name, of in results.items()}
    return [*model_lines(methods, firsts), *table.lines(), *_notes(results)]


def method_table(results: Mapping[str, SeedResults]) -> ResultTable:
    """Return a row for each method: means over devices, and the worst device, with deviations over seeds.

    Args:
        results: Results of each method.
    """
    rows: list[list[Cell]] = []
    for name, of in results.items():
        tables = [result.table() for result in of.values()]
        worst = spread_of(min((row.kept for row in table if row.kept is not None), default=None) for table in tables)
        rows.append([name, len(of), len(of.devices), *_means(tables), worst])
    heads = ("method", "seeds", "devices", *FIGURES, "worst device")
    return ResultTable(heads, rows, (*FIGURES, "worst device"))


def _figures(rows: Sequence[DeviceRow]) -> list[Cell]:
    return [spread_of(getattr(row, column) for row in rows) for column in FIGURES.values()]


def _means(tables: Sequence[DeviceTable]) -> list[Cell]:
    return [spread_of(table.mean(column) for table in tables) for column in FIGURES.values()]


def _notes(results: Mapping[str, SeedResults]) -> list[str]:
    """Return the comparisons of each method with the first one, and what the columns mean."""
    (first, reference), *others = results.items()
    means = reference.means()
    differences = {name: difference_over_seeds(of.means(), means) for name, of in others}
    lines = [difference.words(name, first) for name, difference in differences.items() if difference is not None]
    metric = TASKS[next(iter(reference.values())).task].metric
    return [
        *(f"what devices keep, {line}" for line in lines),
        f"mean ± standard deviation over {len(reference)} seeds; in the last rows, of the mean over devices",
        f"kept: {metric} of what the device predicts with in the end",
        *COLUMN_NOTES,
    ]
