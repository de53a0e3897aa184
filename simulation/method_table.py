"""The table of `fedserver simulate --seeds`, and the file of `--table`: methods side by side, with deviations over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attune.common.statistics import LEVEL, Finding, finding, holm, mcnemar
from attune.common.task import TASKS
from attune.fedserver.choosing.candidates import ComparedMethod
from attune.simulation.comparison_table import ALONE_NOTE, COLUMN_NOTES, model_lines
from attune.simulation.over_seeds import SeedResults, against_first
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
    figures, (findings, note) = _figures(results), _against_first(results)
    for name, of in results.items():
        tables = [result.table() for result in of.values()]
        worst = spread_of(min((row.kept for row in table if row.kept is not None), default=None) for table in tables)
        title = next(iter(of.values())).title
        differs = findings.get(name, ("-", None))[: 2 if findings else 0]
        rows.append([title, len(of), len(of.devices), *_means(tables, figures), worst, *differs])
    tested = (f"against {next(iter(results))}", "p") if findings else ()
    return ResultTable(
        ("method", "seeds", "devices", *figures, "worst device", *tested), rows, (*figures, "worst device"), note=note
    )


def _against_first(results: Mapping[str, SeedResults]) -> tuple[dict[str, tuple[Finding, float | None]], str]:
    """Return for each method but the first how what devices keep differs, with Holm's p, and the test in words.

    The paired t-test over seeds is about these devices. With fewer seeds the sign test over devices is about these seeds.
    """
    first, *others = results
    over = {name: (one.verdict, one.p) for name, one in against_first(results).items() if one.verdict is not None}
    seeds = len(results[first])
    if over or not others:
        test = f"paired t-test over {seeds} seeds"
    else:
        kept = {name: _kept(of) for name, of in results.items()}
        devices = set.intersection(*map(set, kept.values()))
        if mcnemar(len(devices), 0) * len(others) > 1 - LEVEL:
            return {}, f"no test of differences: {seeds} seeds and {len(devices)} devices are too few for {len(others)} methods"
        won, lost = ({n: sum(sign * (kept[n][d] - kept[first][d]) > 0 for d in devices) for n in others} for sign in (1, -1))
        adjusted = holm({name: mcnemar(won[name], lost[name]) for name in others})
        over = {name: (finding(won[name], lost[name], p), p) for name, p in adjusted.items()}
        test = f"sign test over {len(devices)} devices"
    return over, f"against {first}: what devices keep, by the {test}, p by Holm for {len(others)} methods" if others else ""


def _kept(of: SeedResults) -> dict[str, float]:
    """Return the mean over seeds of what each device keeps, for the devices with a value for every seed."""
    tables = [{row.device: row.kept for row in result.table()} for result in of.values()]
    spreads = {device: spread_of(table.get(device) for table in tables) for device in tables[0]}
    return {device: spread.mean for device, spread in spreads.items() if spread is not None}


def _figures(results: Mapping[str, SeedResults]) -> dict[str, str]:
    """Return the heads and columns of these results: FIGURES, without ordinary models where no device has any."""
    known = any(result.table().mean("alone") is not None for of in results.values() for result in of.values())
    return {head: column for head, column in FIGURES.items() if known or column != "alone"}


def _means(tables: Sequence[DeviceTable], figures: Mapping[str, str]) -> list[Cell]:
    return [spread_of(table.mean(column) for table in tables) for column in figures.values()]


def _notes(results: Mapping[str, SeedResults]) -> list[str]:
    """Return the comparisons of each method with the first one, and what the columns mean."""
    first, reference = next(iter(results.items()))
    lines = [difference.words(name, first, len(results) - 1) for name, difference in against_first(results).items()]
    metric = TASKS[next(iter(reference.values())).task].metric
    return [
        *(f"what devices keep, {line}" for line in lines),
        f"mean ± standard deviation over {len(reference)} seeds; in the last rows, of the mean over devices",
        f"kept: {metric} of what the device predicts with in the end",
        *([ALONE_NOTE] if "alone" in _figures(results) else []),
        *COLUMN_NOTES,
    ]
