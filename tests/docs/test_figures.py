"""Figures in the prose of README and the documents, and of the demo, read from the committed result files."""

import csv
import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from attune.common.statistics import mcnemar
from benchmarks import measure, paper_findings, tables
from benchmarks.recipes.catalogue import ALONE, CLOSED_FORM
from benchmarks.recipes.public_table import PUBLIC
from examples.outcome import COLUMNS

Row = Mapping[str, str]
MODELS = ("mlr", "dnn", "transformer")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def rows_of(root: Path, name: str) -> list[Row]:
    with (root / "benchmarks" / "results" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def prose(page: Any, path: str) -> str:
    """Return a page's text in one line, without its generated regions and emphasis."""
    return re.sub(r"\s+", " ", measure.hand_written(page(path).text).replace("**", ""))


def mean(rows: Iterable[Row], figure: str, **chosen: str) -> float:
    return fmean(float(row[figure]) for row in rows if all(row[key] == value for key, value in chosen.items()))


def test_reference_has_no_figure_that_is_written_by_hand(page: Any) -> None:
    assert not re.findall(r"\d+\.\d", prose(page, "docs/reference.md"))


def test_what_the_papers_tables_say_changes_with_their_files(tmp_path: Path, root: Path) -> None:
    for file in (root / "benchmarks" / "results" / "papers").glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert list(paper_findings.findings(tmp_path)) == list(paper_findings.findings())
    with (tmp_path / "fedtp-2.csv").open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        rows, columns = list(table), table.fieldnames or ()
    for row in rows:
        if row["row"] == "FedPer-T":
            row[tables.load("fedtp-2").figure] = "0.1234"
    with (tmp_path / "fedtp-2.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    assert "then FedPer 12.3" in " ".join(paper_findings.findings(tmp_path)).replace("\n", " ")


def test_security_has_the_measured_cost_of_stalling(page: Any, root: Path) -> None:
    result = json.loads((root / "benchmarks" / "results" / "stalling.json").read_text(encoding="utf-8"))
    costs = [100 * attack["cost"] for attack in result["attacks"].values()]
    assert result["span_s"] == 3600 and max(costs) <= 10
    said = f"beside an undisturbed one, four kinds of stalling cost {min(costs):.1f} to {max(costs):.1f} %"
    assert len(costs) == 4 and said in prose(page, "docs/security.md")


def test_scale_has_what_many_devices_cost(page: Any, root: Path) -> None:
    many = json.loads((root / "benchmarks" / "results" / "many_devices.json").read_text(encoding="utf-8"))
    said, each_kib = prose(page, "docs/scale.md"), 1024 * (many["peak_mib"] - many["before_mib"]) / many["devices"]
    assert f"take {many['peak_mib'] / 1024:.2f} GiB and {many['processor_s']:.0f} s of processor time" in said
    assert f"takes {each_kib:.0f} KiB" in said and f"{1000 * many['processor_s'] / many['devices']:.1f} ms each" in said


def test_scale_has_the_measured_cost_of_single_calls(page: Any, root: Path) -> None:
    result = json.loads((root / "benchmarks" / "results" / "stores.json").read_text(encoding="utf-8"))
    said = page("docs/scale.md").text.partition("| | folder | PostgreSQL and S3 |\n|---|---|---|\n")[2].partition("\n\n")[0]
    table = [line.strip("| ").split(" | ") for line in said.splitlines()]
    assert len(table) == len(result["folder"])
    for row, name in zip(table, result["folder"], strict=True):
        for cell, place in zip(row[1:], ("folder", "PostgreSQL and S3"), strict=True):
            digits = len(cell.partition(".")[2])
            assert round(result[place][name], digits) == float(cell), (name, place)


def test_readme_has_the_first_result_of_its_file(page: Any, root: Path) -> None:
    table = page("README.md").text
    for row in rows_of(root, "first_result.csv"):
        served = f"{float(row['served']):.3f}" if row["served"] else "-"
        said = (row["method"], *(f"{float(row[name]):.3f}" for name in ("kept", "alone", "own")), served)
        assert re.search(r"\nmean +" + " +".join(map(re.escape, said)) + " ", table), said


def test_choosing_has_the_figures_of_the_races(page: Any, root: Path) -> None:
    races: dict[tuple[str, ...], dict[str, float]] = {}
    rows = rows_of(root, "auto.csv")
    for row in rows:
        races.setdefault((row["recipe"], row["x"], row["seed"]), {})[row["method"]] = float(row["kept"])
    behind = [max(kept.values()) - kept["auto"] for kept in races.values()]
    text = prose(page, "docs/choosing.md")
    near, raced = sum(gap <= 0.5 for gap in behind), len(behind)
    assert f"in {near} of {raced} runs `auto` keeps at most half a point less than the best candidate" in text
    assert f"and {fmean(behind):.1f} points less on average" in text
    chosen = {tuple(row[name] for name in ("recipe", "x", "seed")): row["chosen"] for row in rows if row["method"] == "auto"}
    alone = [chosen[run] for run, gap in zip(races, behind, strict=True) if gap > 0.5 and chosen[run] == "local"]
    assert f"In {len(alone)} of the others it stays with training alone" in text
    assert f"`digits` 20 loses {behind[list(races).index(('digits', '20', '0'))]:.1f} points" in text
    as_near = Counter(
        name for kept in races.values() for name in kept if name != "auto" and max(kept.values()) - kept[name] <= 0.5
    )
    assert f"No candidate is as near in more than {max(as_near.values())} runs" in text


def test_choosing_says_by_figures_where_one_round_is_enough(page: Any, root: Path) -> None:
    text = prose(page, "docs/choosing.md")

    def kept(recipe: str) -> dict[tuple[str, float], dict[str, float]]:
        means: dict[tuple[str, float], dict[str, float]] = {}
        for row in (rows := list(rows_of(root, f"recipes/{recipe}.csv"))):
            here = {name: row[name] for name in ("series", "x", "method")}
            means.setdefault((row["series"], float(row["x"])), {})[row["method"]] = 100 * mean(rows, "mean", **here)
        return means

    for recipe, means in {"`wisdm` 250": kept("wisdm")["", 250.0], "`hospitals`": kept("hospitals")["", 1.0]}.items():
        assert f"{recipe} (alone {means[ALONE]:.1f}, closed form {means[CLOSED_FORM.label]:.1f})" in text
        assert max(means.values()) < means[ALONE] + 1
    means = kept("one-minute")["as recorded", 2.0]
    said = f"(alone {means[ALONE]:.1f}, closed form {means[CLOSED_FORM.label]:.1f}, tuned FedAvg {means['FedAvg, tuned']:.1f})"
    assert f"`one-minute` 2 {said}" in text
    gains, behind = [], []
    for recipe in ("digits", "label-shift", "feature-shift", "relatedness", "school"):
        for means in kept(recipe).values():
            gains.append(means[CLOSED_FORM.label] - means[ALONE])
            behind.append(max(means.values()) - means[CLOSED_FORM.label])
    assert f"is {min(gains):.1f} to {max(gains):.0f} points ahead of alone" in text
    assert f"more than {max(behind):.1f} points ahead of it" in text


def test_rounds_says_why_an_early_end_is_not_the_default(page: Any, root: Path) -> None:
    kept: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows_of(root, "enough_blend.csv"):
        kept.setdefault((row["point"], row["method"]), {})[row["budget"]] = 100 * float(row["kept"])
    moved = [of["auto"] - of["default"] for of in kept.values()]
    said = f"{min(moved):+.1f} to {max(moved):+.1f} points in {len(moved)} pairs of runs, {abs(fmean(moved)):.1f} on average"
    assert said in prose(page, "docs/operations/rounds.md")


def test_choosing_says_what_pays_in_schools_and_clinics(page: Any, root: Path) -> None:
    text, gains = prose(page, "docs/choosing.md"), []
    for name in PUBLIC:
        rows = rows_of(root, f"recipes/{name}.csv")
        kept = {row["method"]: 100 * mean(rows, "mean", method=row["method"]) for row in rows}
        if name in ("opt", "covid-testing"):
            assert max(kept.values()) < 100 * mean(rows, "constant") + 2
        else:
            gains.append(kept["closed form"] - kept["alone (scikit-learn)"])
            assert max(kept.values()) < kept["closed form"] + 1
    assert f"the closed form is {min(gains):.0f} to {max(gains):.0f} points ahead of alone" in text


def test_does_it_help_says_what_the_page_says_of_clinics_with_few_cases(page: Any, root: Path) -> None:
    said = json.loads((root / "benchmarks" / "results" / "covid-testing.json").read_text(encoding="utf-8"))
    few, pooled = said["results"]["too few cases"], said["pooled"]
    words = (
        f"{few} of {sum(said['results'].values())} clinics have too few cases, and {pooled['gain']:+.3f} pooled over the other"
    )
    assert said["score"] == "AUROC" and pooled["interval"] is None and pooled["too_few"] == few
    assert f"{words} {pooled['sites']}, without an interval" in prose(page, "docs/does-it-help.md")


def test_does_it_help_has_the_figures_of_the_choice(page: Any, root: Path) -> None:
    rows = rows_of(root, "choice.csv")
    places = dict.fromkeys((row["recipe"], row["series"]) for row in rows)
    kinds = dict.fromkeys((row["recipe"], row["series"], row["method"]) for row in rows)
    worst = max(mean(rows, "behind", recipe=recipe, series=series, method=method) for recipe, series, method in kinds)
    text = prose(page, "docs/does-it-help.md")
    assert (
        f"Over {NUMBERS[len(places)]} data sets with all their points, the kept model is at most {worst:.1f} points below"
        in text
    )
    assert f"In {100 * mean(rows, 'harmed'):.1f} % of the cases" in text
    harmed = [row for row in rows if float(row["harmed"]) > 0]
    assert {row["recipe"] for row in harmed} == {"one-minute"}
    windows = [row for row in rows if row["recipe"] == "one-minute"]
    by_recordings = sum(int(row["devices"]) * float(row["harmed_by_groups"]) for row in windows)
    devices = sum(int(row["devices"]) for row in windows)
    assert f"By recordings instead of windows it is {NUMBERS[round(by_recordings)]} device in {devices:,}" in text


def test_choosing_says_which_model_for_tables_leads_and_what_a_schema_costs(page: Any, root: Path) -> None:
    """The figures of the prose, with Student's quantiles of 2 and 7 degrees from a printed table."""
    results = json.loads((root / "benchmarks" / "results" / "schemas.json").read_text(encoding="utf-8"))
    text = re.sub(r"\s+", " ", prose(page, "docs/choosing.md").split("## Models for tables", 1)[1].split("## When", 1)[0])
    scores: dict[tuple[str, str], float] = {}
    apart, surely = [], []
    for name in ("heart", "wisdm", "school"):
        for model in MODELS:
            runs = [row for key, row in results.items() if key.startswith(f"{name} {model} ")]
            gains = [row["by_schema"] - row["by_hand"] for row in runs]
            half = {3: 4.3027, 8: 2.3646}[len(runs)] * statistics.stdev(gains) / len(runs) ** 0.5
            scores[name, model] = fmean(row["by_schema"] for row in runs)
            apart.append(fmean(gains))
            surely += [f"{model} on {name}"] * (fmean(gains) - half > -0.5)
    assert f"A schema is on average at most {-min(apart):.1f} points behind" in text
    assert surely == ["mlr on heart", "dnn on heart", "mlr on wisdm", "dnn on wisdm"]
    assert "that it is less than half a point is sure for `mlr` and `dnn` on heart disease and WISDM" in text
    best = {name: max(MODELS, key=lambda model, name=name: scores[name, model]) for name, _ in scores}
    behind = max(scores[name, model] - scores[name, "dnn"] for name, model in best.items())
    assert f"`dnn`, the default for tables, is at most {behind:.1f} points behind the best model" in text


def test_privacy_says_what_a_secure_round_costs(page: Any, root: Path) -> None:
    measured = json.loads((root / "benchmarks" / "results" / "secure_round.json").read_bytes())
    assert f"with 1 M values takes {measured['ratio']:.1f} times the processor time" in prose(page, "docs/privacy.md")


def test_privacy_says_what_a_sum_shows_above_chance(page: Any, root: Path) -> None:
    with (root / "benchmarks" / "results" / "visible_by_mode.csv").open(newline="", encoding="utf-8") as file:
        value = {(row["attack"], row["setting"], row["measure"]): float(row["value"]) for row in csv.DictReader(file)}

    def figure(who: str, features: int, measure: str) -> str:
        return f"{value[f'inversion by {who}', f'{features} features, batches of 16', measure]:.3f}"

    few, many = (
        " ± ".join(figure("rebuilt", features, name) for name in ("correlation above chance", "half of its 95 % interval"))
        for features in (64, 784)
    )
    means = " and ".join(figure("class means", features, "correlation above chance") for features in (64, 784))
    text = prose(page, "docs/privacy.md")
    assert f"Above chance it gets {few} with 64 features and {many} with 784 (95 %, 20 federations)" in re.sub(
        r"\s+", " ", text
    )
    assert f"The mean input of each class alone gives {means}." in text


def test_buffered_rounds_over_the_network_have_the_figures_of_their_file(page: Any, root: Path) -> None:
    cases = json.loads((root / "benchmarks" / "results" / "buffered_network.json").read_bytes())["cases"]

    def span(case: str, figure: str, factor: float) -> str:
        values = [factor * float(row[figure]) for row in cases if row["case"] == case]
        return f"{min(values):.0f} to {max(values):.0f}"

    text = prose(page, "docs/operations/rounds.md")
    for case in ("buffered", "over-selection", "synchronous"):
        assert f"with {span(case, 'accuracy', 100)} % in {span(case, 'seconds', 1)} s" in text


def test_the_figures_of_the_demo_come_from_its_file(page: Any, root: Path) -> None:
    with (root / "benchmarks" / "results" / "demo.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    total = sum(int(row["test_samples"]) for row in rows)
    columns = [key for key in COLUMNS if key in rows[0]]
    means = [fmean(float(row[key]) for row in rows) for key in columns]
    pooled = [sum(float(row[key]) * int(row["test_samples"]) for row in rows) / total for key in columns]
    text = page("README.md").text.replace("**", "").replace("\n", " ")
    assert f"| mean over devices | {' | '.join(f'{value:.3f}' for value in means)} |" in text
    assert f"| over all {total} test samples | {' | '.join(f'{value:.3f}' for value in pooled)} |" in text
    numbers = ("none", "one", "two", "three", "four", "five")
    forms = {
        "kept": f"ahead of alone on {{}} of the {len(rows)} devices and behind on {{}} (sign test, p = {{:.2g}})",
        "analytic": "ahead of alone on {} devices, behind on {} (p = {:.2g})",
    }
    for model, form in forms.items():
        gains = [float(row[model]) - float(row["alone"]) for row in rows]
        ahead, behind = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        assert form.format(ahead, numbers[behind], mcnemar(ahead, behind)) in text
