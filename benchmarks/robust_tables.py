"""Tables of attackers in docs/security.md, written from the rows of `benchmarks.robust` and `benchmarks.bounded`."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.robust import ATTACKS, RULES

RESULTS = Path(__file__).parent / "results"
SHARES = ("0.1", "0.2", "0.4")
AIM_SHARE, AIM_ROBUST, AIM_DEFAULT = "0.2", 2.0, 5.0  # points that honest devices may lose
Row = Mapping[str, str]


def _read(name: str) -> list[Row]:
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sections() -> Iterator[str]:
    rows = _read("robust.csv")
    for data in dict.fromkeys(row["data"] for row in rows):
        for method in RULES:
            if chosen := [row for row in rows if (row["data"], row["method"]) == (data, method)]:
                yield from _attacked(data, method, chosen)
                yield ""
    yield from _sizes(_read("robust_bound.csv"), rows)
    yield ""
    yield from _honest(_read("bounded.csv"))


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


def _sizes(narrow: Sequence[Row], wide: Sequence[Row]) -> Iterator[str]:
    """Return the lines that compare the default bound of 3 with one of 1.5, for the same federations."""
    same = ("data", "method", "rule", "attack", "share")
    usual = {tuple(row[name] for name in same): row["lost_points"] for row in wide}
    found = {row["attack"]: row for row in narrow if row["rule"] == "default" and row["attack"] in ATTACKS}
    yield "The bound of 3 beside one of 1.5: FedAvg on digits with the defaults, 20 % attackers, points lost."
    yield ""
    yield "| a bound of | " + " | ".join(found) + " |"
    yield f"|---|{'---|' * len(found)}"
    keys = [tuple(row[name] for name in same) for row in found.values()]
    yield f"| 3 | {' | '.join(usual.get(key, '-') for key in keys)} |"
    yield f"| 1.5 | {' | '.join(row['lost_points'] for row in found.values())} |"


def _honest(rows: Sequence[Row]) -> Iterator[str]:
    sizes = [name.removeprefix("above_") for name in rows[0] if name.startswith("above_")]
    yield "Shares of honest updates whose change is above so many median norms, and the largest change."
    yield ""
    yield f"| split of digits | method | {' | '.join(f'above {size}' for size in sizes)} | the largest |"
    yield f"|---|---|{'---|' * len(sizes)}---|"
    for row in rows:
        share = [f"{100 * int(row[f'above_{size}']) / int(row['updates']):.1f} %" for size in sizes]
        yield f"| {row['split']} | {row['method']} | {' | '.join(share)} | {row['largest']} |"
