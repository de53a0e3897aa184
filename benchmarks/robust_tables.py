"""Tables of attackers in docs/security.md, from the rows of `benchmarks.robust`, `.liars` and `.bounded`."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from attune.common.statistics import interval_of_mean
from benchmarks.liars import CLAIM, MORE_RULES, SIZES
from benchmarks.robust import ATTACKS, RULES

RESULTS = Path(__file__).parent / "results"
SHARES = ("0.1", "0.2", "0.4")
AIM_SHARE, AIM_ROBUST, AIM_DEFAULT = "0.2", 2.0, 5.0  # points that honest devices may lose
LIARS = ("0.2", "0.3")  # shares of liars
USUAL = {"method": "fedavg", "devices": "20", "cohort": "0", "rounds": "20"}
UNLIKE = ("dirichlet 1.0", "dirichlet 0.1", "two classes")
Row = Mapping[str, str]


def read_rows(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sections() -> Iterator[str]:
    rows = read_rows("robust.csv")
    for data in dict.fromkeys(row["data"] for row in rows):
        for method in RULES:
            if chosen := [row for row in rows if (row["data"], row["method"]) == (data, method)]:
                yield from _attacked(data, method, chosen)
                yield ""
    yield from _honest(read_rows("bounded.csv"))


def _attacked(data: str, method: str, rows: Sequence[Row]) -> Iterator[str]:
    lost = {(row["rule"], row["attack"], row["share"]): float(row["lost_points"]) for row in rows}
    clean = next(row for row in rows if (row["rule"], row["attack"]) == ("off", "none"))
    yield f"**{method}, {data}**: accuracy {float(clean['accuracy']):.3f} without attackers."
    yield ""
    yield f"| rule | no attack | {' | '.join(ATTACKS)} |"
    yield f"|---|---|{'---|' * len(ATTACKS)}"
    for rule in RULES[method]:
        if any(key[0] == rule for key in lost):
            cells = [" / ".join(_cell(rule, share, lost.get((rule, attack, share))) for share in SHARES) for attack in ATTACKS]
            yield f"| {rule} | {_cell(rule, '0.0', lost.get((rule, 'none', '0.0')))} | {' | '.join(cells)} |"


def _cell(rule: str, share: str, points: float | None) -> str:
    if points is None:
        return "-"
    aim = {"off": float("inf"), "default": AIM_DEFAULT}.get(rule, AIM_ROBUST)
    return f"**{points:.1f}**" if share == AIM_SHARE and points > aim else f"{points:.1f}"


def _honest(rows: Sequence[Row]) -> Iterator[str]:
    sizes = [name.removeprefix("above_") for name in rows[0] if name.startswith("above_")]
    yield "Shares of honest updates whose change is above so many median norms, and the largest change."
    yield ""
    yield f"| split of digits | method | {' | '.join(f'above {size}' for size in sizes)} | the largest |"
    yield f"|---|---|{'---|' * len(sizes)}---|"
    for row in rows:
        share = [f"{100 * int(row[f'above_{size}']) / int(row['updates']):.1f} %" for size in sizes]
        yield f"| {row['split']} | {row['method']} | {' | '.join(share)} | {row['largest']} |"


def liars() -> Iterator[str]:
    """Yield the lines of the tables of liars that adapt."""
    rows = read_rows("liars.csv")
    yield from _costliest(rows)
    yield ""
    yield from _curve(rows)
    yield ""
    yield from _rules(rows)


def costs(rows: Sequence[Row], **group: str) -> tuple[float, float, str] | None:
    """Return what liars cost with all seeds: the mean, half its interval, and the costliest lie with its size.

    Args:
        rows: The rows of liars.csv.
        group: The values of columns that choose the federation, the rule and the share.

    Returns:
        None if no lie was measured with more than one seed.
    """
    lost: dict[str, list[float]] = {}
    for row in rows:
        if all(row[name] == value for name, value in group.items()) and row["attack"] != CLAIM:
            lost.setdefault(f"{row['attack']} x {row['size']}", []).append(float(row["lost_points"]))
    found = {lie: values for lie, values in lost.items() if len(values) > 1}
    if not found:
        return None
    lie = max(found, key=lambda name: fmean(found[name]))
    low, high = interval_of_mean(found[lie]) or (0.0, 0.0)
    return (low + high) / 2, (high - low) / 2, lie


def _with_interval(found: tuple[float, float, str] | None, named: bool = True) -> str:
    if found is None:
        return "-"
    mean, half, lie = found
    return f"{mean:.1f} ± {half:.1f}" + (f" ({lie})" if named else "")


def _costliest(rows: Sequence[Row]) -> Iterator[str]:
    yield "With the defaults, the costliest lie: mean points lost over five seeds, with the 95 % interval."
    yield ""
    yield "| method | devices | of a round | rounds | 20 % liars | 30 % liars |"
    yield "|---|---|---|---|---|---|"
    kinds = dict.fromkeys((row["method"], row["devices"], row["cohort"], row["rounds"]) for row in rows)
    for method, devices, cohort, rounds in kinds:
        group = {"method": method, "devices": devices, "cohort": cohort, "rounds": rounds, "rule": "default"}
        cells = [_with_interval(costs(rows, **group, split=UNLIKE[0], share=share)) for share in LIARS]
        if cells != ["-", "-"]:
            yield f"| {method} | {devices} | {cohort if cohort != '0' else 'all'} | {rounds} | {' | '.join(cells)} |"


def _curve(rows: Sequence[Row]) -> Iterator[str]:
    """Return the lines that show what each lie costs by its size: FedAvg, 20 devices, the defaults, seed 0."""
    sizes = sorted({f"{size:g}" for of in SIZES.values() for size in of}, key=float)
    group = {
        "split": UNLIKE[0],
        "method": "fedavg",
        "devices": "20",
        "cohort": "0",
        "rounds": "20",
        "rule": "default",
        "seed": "0",
    }
    lost = {
        (row["attack"], row["size"], row["share"]): f"{float(row['lost_points']):.1f}"
        for row in rows
        if all(row[name] == value for name, value in group.items())
    }
    yield "FedAvg, 20 devices, the defaults, one seed: points lost with 20 / 30 % liars, by the size of the lie."
    yield ""
    yield "| lie | " + " | ".join(f"x {size}" for size in sizes) + " |"
    yield f"|---|{'---|' * len(sizes)}"
    for kind in SIZES:
        cells = [" / ".join(lost.get((kind, size, share), "-") for share in LIARS) for size in sizes]
        yield f"| {kind} | " + " | ".join("" if cell == "- / -" else cell for cell in cells) + " |"
    longer = [row for row in rows if row["rounds"] == "60"]
    small = {f"{row['attack']} x {row['size']}": "" for row in longer}
    for lie in small:
        chosen = (row for row in longer if f"{row['attack']} x {row['size']}" == lie)
        small[lie] = " / ".join(f"{float(row['lost_points']):.1f}" for row in sorted(chosen, key=lambda row: row["share"]))
    yield ""
    yield f"Small steps over 60 rounds: {'; '.join(f'{lie} {points}' for lie, points in small.items())}."


def _rules(rows: Sequence[Row]) -> Iterator[str]:
    yield "FedAvg, 20 devices, by rule: points lost without liars by the split, and to the costliest lie; five seeds."
    yield ""
    yield f"| rule | {' | '.join(f'honest, {split}' for split in UNLIKE)} | 20 % liars | 30 % liars |"
    yield f"|---|{'---|' * len(UNLIKE)}---|---|"
    for rule in ("default", *MORE_RULES):
        group = USUAL | {"rule": rule}
        honest = [_with_interval(costs(rows, **group, split=split, attack="none"), named=False) for split in UNLIKE]
        lied = [_with_interval(costs(rows, **group, split=UNLIKE[0], share=share)) for share in LIARS]
        yield f"| {rule} | {' | '.join([*honest, *lied])} |"
