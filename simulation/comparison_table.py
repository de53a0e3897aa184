"""Tables of `fedserver simulate`: what devices keep, what they are served, the verdicts, and who is harmed.

With --seeds, and in the file of --table, methods stand side by side, with deviations over seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from attune.common.metrics import KEPT_RIVALS, Rival
from attune.common.statistics import LEVEL, RIVAL_WORDS, Finding, HelpOrHarm, finding, findings_of, holm, mcnemar, pairs_of
from attune.common.task import SCORED
from attune.common.text import aligned
from attune.fedclient.data.lazy_shard import LazyShard
from attune.fedclient.work.comparison import Places, compared
from attune.fedserver.choosing.candidates import ComparedMethod
from attune.fedserver.core.fleet_verdict import FleetVerdict, effect_of, fleet_verdicts, pooled_auroc
from attune.simulation.over_seeds import SeedResults, against_first
from attune.simulation.result import DeviceRow, DeviceTable, SimulationResult
from attune.simulation.result_table import Cell, ResultTable, spread_of, text_of

RIVAL_METHODS: Mapping[str, Rival] = {"local": "local", "fedavg": "common"}  # methods -> what they are rivals as
HEADS = ("device", "samples", "method", "kept", "alone", "own", "served", "verdict", "harmed", "probably", "keeps")
LEFT = [HEADS.index(head) for head in ("device", "method", "keeps")]  # columns of words
ALONE_NOTE = "alone: of the best ordinary model (scikit-learn) that the device fits on its own samples"
COLUMN_NOTES = (
    "own: of the method's own model on the device",
    "served: of what the server sends, with the parts that stay on the device, before it trains",
)

Right = Mapping[str, Tensor]  # for each device, the scores of its model on its test samples, (N,) or (N, T)


def comparison(
    methods: Sequence[ComparedMethod], results: Mapping[str, SimulationResult], members: Mapping[str, LazyShard]
) -> list[str]:
    """Return the lines of the table: for each device a row for each method, then the means, and what the columns mean.

    A table of one method names it in its head, and has no column for it.

    Args:
        methods: The methods, in the order of the table.
        results: Result of each method.
        members: The shard of each device.
    """
    right = {name: _right(result, members) for name, result in results.items()}
    numbers = {name: _compared(name, right, members, result.reports) for name, result in results.items()}
    harm = {name: {device: _harmed(of.get(device)) for device in members} for name, of in numbers.items()}
    verdicts = {name: fleet_verdicts((_rivals(name, results) and of) or results[name].reports) for name, of in numbers.items()}
    rows = {name: {row.device: row for row in result.table()} for name, result in results.items()}
    lines: list[Sequence[str]] = [HEADS]
    for device in sorted(members):
        lines += [
            _cells(results[name].title, of[device], harm[name][device], effect_of(verdicts[name], device))
            for name, of in rows.items()
            if device in of
        ]
    lines += [_means(result, harm[name], verdicts[name]) for name, result in results.items()]
    has_alone = any(row.alone is not None for of in rows.values() for row in of.values())
    left_out = {head for head, there in (("method", len(results) > 1), ("alone", has_alone)) if not there}
    shown = [at for at, head in enumerate(HEADS) if head not in left_out]
    left = [place for place, at in enumerate(shown) if at in LEFT]
    table = aligned([[line[at] for at in shown] for line in lines], left)
    return [*model_lines(methods, results), *table, *_notes(results, harm, verdicts)]


def course(result: SimulationResult, members: Mapping[str, LazyShard]) -> list[str]:
    """Return the table of the methods that `auto` trained to the end, its choice first, and the lines of its race.

    Args:
        result: A result of `auto`.
        members: The shard of each device.
    """
    assert result.auto is not None  # noqa: S101 (the method was auto)
    results = {result.auto.chosen: result, **result.rivals}
    return [*comparison([ComparedMethod(name, {}) for name in results], results, members), *result.auto.words()]


def courses(results: SeedResults) -> list[str]:
    """Return the table over seeds of what `auto` has led to, and for each seed what it chose and why."""
    lines = str(results).splitlines()
    for seed, result in results.items():
        assert result.auto is not None  # noqa: S101 (the method was auto)
        lines += [f"seed {seed}: {line}" for line in result.auto.words()]
    return lines


def harmed(mine: Tensor, rivals: Mapping[Rival, Tensor], groups: Places | None = None) -> bool | None:
    """Return whether a device's model is worse than a rival by more than chance; None without rivals.

    The test is that of the verdict: exact and paired, with Holm's correction. Equal models are called harmed in at most 5 %.

    Args:
        mine: Scores of the device's model on its test samples, (N,) or (N, T).
        rivals: The same for each rival.
        groups: Number of each test sample's group, (N,). A group counts once.
    """
    return _harmed(_numbers(mine, rivals, groups)) if rivals else None


def _numbers(mine: Tensor, rivals: Mapping[Rival, Tensor], groups: Places | None) -> dict[str, float]:
    """Return the comparisons with all rivals, as a device reports those of what it keeps."""
    numbers: dict[str, float] = {"test_samples": len(mine)}
    for name, theirs in rivals.items():
        numbers |= compared(mine, theirs, KEPT_RIVALS[name], groups)
    return numbers


def _harmed(numbers: Mapping[str, float] | None) -> bool | None:
    """Return whether any rival is better by the strict test; None without a comparison."""
    return None if numbers is None else "worse" in findings_of(pairs_of(numbers, KEPT_RIVALS)).values()


def _right(result: SimulationResult, members: Mapping[str, LazyShard]) -> Right:
    """Return the scores of what each device predicts with; none of one score. Devices without a test part are absent."""
    if not SCORED[result.task].by_sample or result.task == "ranked":
        return {}
    return {
        name: result.model(name).right(member.load())
        for name, member in members.items()
        if member.profile.test_samples and name in result.devices
    }


def _rivals(method: str, results: Mapping[str, Any]) -> dict[Rival, str]:
    """Return the rivals of a method among the methods of the table."""
    return {rival: name for name, rival in RIVAL_METHODS.items() if name in results and name != method}


def _compared(
    method: str, right: Mapping[str, Right], members: Mapping[str, LazyShard], reports: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return each device's comparisons with rivals among the methods, and its own with ordinary models alone, by device."""
    rivals = {rival: right[name] for rival, name in _rivals(method, right).items()}
    numbers: dict[str, dict[str, float]] = {}
    for device, mine in right[method].items():
        against = _alone(reports[device])
        if others := {rival: of[device] for rival, of in rivals.items() if device in of}:
            against |= _numbers(mine, others, members[device].load().test_places)
        if against:
            numbers[device] = against
    return numbers


def _alone(report: Mapping[str, Any]) -> dict[str, float]:
    """Return what a device says of what it keeps against ordinary models alone; empty if it fitted none."""
    names = KEPT_RIVALS["alone"]
    fields = ("test_samples", "test_groups", names.better, names.worse, names.gain, names.error, names.p)
    return {name: report[name] for name in fields if name in report} if names.better in report else {}


def model_lines(methods: Sequence[ComparedMethod], results: Mapping[str, SimulationResult]) -> list[str]:
    """Return a line with the model of the methods, and one for each method that cannot use the model of the others."""
    by_model: dict[str, list[str]] = {}
    for result in results.values():
        by_model.setdefault(str(result.summary["model"]), []).append(result.title)
    [(model, titles), *others] = by_model.items()
    if not others:
        words = model + (", for all methods" if len(titles) > 1 else f"; method: {titles[0]}")
    else:
        words = ", ".join(f"{model} ({', '.join(names)})" for model, names in by_model.items())
    return [f"model: {words}", *(method.why for method in methods if method.why)]


def _cells(method: str, row: DeviceRow, harm: bool | None, probably: HelpOrHarm | None) -> tuple[str, ...]:
    harmed = None if harm is None else "yes" if harm else "no"
    scores = row.kept, row.alone, row.accuracy, row.served
    return tuple(map(text_of, (row.device, row.samples, method, *scores, row.verdict, harmed, probably, row.keeps)))


def _means(result: SimulationResult, harm: Mapping[str, bool | None], fleet: Sequence[FleetVerdict]) -> tuple[str, ...]:
    table = result.table()
    verdicts = Counter(row.verdict for row in table if row.verdict)
    counts = ", ".join(f"{verdicts[word]} {word}" for word in ("better", "worse", "unclear", "too few cases") if verdicts[word])
    known = [value for value in harm.values() if value is not None]
    scores = (text_of(table.mean(name)) for name in ("kept", "alone", "accuracy", "served"))
    harmed = f"{sum(known)} of {len(known)}" if known else "-"
    return "mean", "", result.title, *scores, counts or "-", harmed, _called(fleet), ""


def _called(verdicts: Sequence[FleetVerdict]) -> str:
    """Return how many devices are probably helped and harmed."""
    calls = Counter(effect_of(verdicts, device) for device in {device for verdict in verdicts for device in verdict.effects})
    return f"{calls['helped']} helped, {calls['harmed']} harmed" if verdicts else "-"


def _notes(
    results: Mapping[str, SimulationResult],
    harm: Mapping[str, Mapping[str, bool | None]],
    verdicts: Mapping[str, Sequence[FleetVerdict]],
) -> list[str]:
    tables = {name: result.table() for name, result in results.items()}
    first = next(iter(tables.values()))
    constant = first.mean("constant")
    lines = []
    if constant is not None:
        beaten = [name for name, table in tables.items() if (kept := table.mean("kept")) is not None and kept <= constant]
        lines.append(f"a constant answer has {constant:.3f} on average")
        lines += [f"no better than a constant answer: {', '.join(beaten)}"] if beaten else []
    for name, listed in verdicts.items():
        lines += [f"{name}: what devices keep {verdict.words()}" for verdict in listed]
        if over := pooled_auroc(results[name].reports.values()):
            lines.append(f"{name}: what devices keep, {over['words']}")
    task = next(iter(results.values())).task
    metric = SCORED[task].metric
    lines += [
        f"kept: {metric} of what the device predicts with in the end, which the last column describes",
        *([ALONE_NOTE] if first.mean("alone") is not None else []),
        *COLUMN_NOTES,
    ]
    if not SCORED[task].by_sample:
        return [
            *lines,
            f"verdict, harmed, probably: not known, because a {metric} is no mean over samples that could be tested",
        ]
    lines.append(
        "verdict: what is kept against ordinary models alone, a network alone (--baseline local), and the common model"
    )
    if any(value is not None for of in harm.values() for value in of.values()):
        lines.append(f"harmed: what is kept is worse than {_rival_words(results)}, by more than chance")
    elif any(row.accuracy is not None for row in first):
        lines.append("harmed: it is not known who is harmed; add local and fedavg to --method")
    else:
        lines.append("harmed: it is not known who is harmed, because no device has a test part")
    if any(verdicts.values()):
        lines.append("probably: helped or harmed by what is kept, with a probability of 95 % from the evidence of all devices")
    return lines


def _rival_words(results: Mapping[str, SimulationResult]) -> str:
    """Return, in words, with what the table compares what a device keeps."""
    left = " or ".join(name for name in RIVAL_METHODS if name in results)
    methods = [f"what {left} leaves this device"] if left and len(results) > 1 else []
    alone = any(result.table().mean("alone") is not None for result in results.values())
    return " or than ".join([*methods, *([RIVAL_WORDS["alone"]] if alone else [])])


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
        ["mean", None, firsts[name].title, *_means_over_seeds([one.table() for one in of.values()], figures)]
        for name, of in results.items()
    ]
    table = ResultTable(("device", "samples", "method", *figures), rows)
    return [*model_lines(methods, firsts), *table.lines(), *_notes_over_seeds(results)]


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
        rows.append([title, len(of), len(of.devices), *_means_over_seeds(tables, figures), worst, *differs])
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


def _means_over_seeds(tables: Sequence[DeviceTable], figures: Mapping[str, str]) -> list[Cell]:
    return [spread_of(table.mean(column) for table in tables) for column in figures.values()]


def _notes_over_seeds(results: Mapping[str, SeedResults]) -> list[str]:
    """Return the comparisons of each method with the first one, and what the columns mean."""
    first, reference = next(iter(results.items()))
    lines = [difference.words(name, first, len(results) - 1) for name, difference in against_first(results).items()]
    metric = SCORED[next(iter(reference.values())).task].metric
    return [
        *(f"what devices keep, {line}" for line in lines),
        f"mean ± standard deviation over {len(reference)} seeds; in the last rows, of the mean over devices",
        f"kept: {metric} of what the device predicts with in the end",
        *([ALONE_NOTE] if "alone" in _figures(results) else []),
        *COLUMN_NOTES,
    ]
