"""The table of `fedserver simulate --seeds`, and the file of `--table`: methods side by side, with deviations over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attune.common.task import TASKS
from attune.fedserver.core.candidates import ComparedMethod
from attune.simulation.comparison_table import ALONE_NOTE, COLUMN_NOTES, model_lines
from attune.simulation.over_seeds import SeedResults, difference_over_seeds
from attune.simulation.result import DeviceTable
from attune.simulation.result_table import Cell, ResultTable, spread_of

FIGURES = {"kept": "kept", "alone": "alone", "own": "accuracy", "served": "served"}  # heads -> columns of a device


def comparison_over_seeds(methods: Sequence[ComparedMethod], results: Mapping[str, SeedResults]) -> list[str]:
    """Return the lines of the table: for each device a row for each method, the means, and the tests over seeds.

    Args:
        methods: The methods, in the order of the table.
        results: Results of each method.
    """
    by_seed = {name: [{row.device: row for row in one.table()} for one in of.values()] for name, of in results.items()}
    devices = sorted(set.intersection(*(set(of.devices) for of in results.values())))
    figures, firsts = _figures(results), {name: next(iter(of.values())) for name, of in results.items()}
    rows: list[list[Cell]] = []
    for device in devices:
        for name, tables in by_seed.items():
            listed = [rows_of[device] for rows_of in tables]
            spreads = (spread_of(getattr(row, column) for row in listed) for column in figures.values())
            rows.append([device, listed[0].samples, firsts[name].title, *spreads])
    rows += [
        ["mean", None, firsts[name].title, *_means([one.table() for one in of.values()], figures)]
        for name, of in results.items()
    ]
    table = ResultTable(("device", "samples", "method", *figures), rows)
    return [*model_lines(methods, firsts), *table.lines(), *_notes(results)]


def method_table(results: Mapping[str, SeedResults]) -> ResultTable:
    """Return a row for each method: means over devices, and the worst device, with deviations over seeds.

    Args:
        results: Results of each method.
    """
    rows: list[list[Cell]] = []
    figures = _figures(results)
    for of in results.values():
        tables = [result.table() for result in of.values()]
        worst = spread_of(min((row.kept for row in table if row.kept is not None), default=None) for table in tables)
        title = next(iter(of.values())).title
        rows.append([title, len(of), len(of.devices), *_means(tables, figures), worst])
    heads = ("method", "seeds", "devices", *figures, "worst device")
    return ResultTable(heads, rows, (*figures, "worst device"))


def _figures(results: Mapping[str, SeedResults]) -> dict[str, str]:
    """Return the heads and columns of these results: FIGURES, without ordinary models where no device has any."""
    known = any(result.table().mean("alone") is not None for of in results.values() for result in of.values())
    return {head: column for head, column in FIGURES.items() if known or column != "alone"}


def _means(tables: Sequence[DeviceTable], figures: Mapping[str, str]) -> list[Cell]:
    return [spread_of(table.mean(column) for table in tables) for column in figures.values()]


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
        *([ALONE_NOTE] if "alone" in _figures(results) else []),
        *COLUMN_NOTES,
    ]
