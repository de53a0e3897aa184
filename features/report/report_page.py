"""`fedserver report`: one page about a run for people who decide. It needs no network, no script and no other file.

The numbers are those of the status. Whatever a peer or a person has written is cleaned and escaped.

The mean of sites' ROC curves is taken at each site's false positive rates, so scores of different sites are never ranked
together (Janes and Pepe, Biometrika 2009). They weigh sites by cases, which no site tells: here each site counts once.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec

from attune import __version__, seams
from attune.common.durable import PUBLIC, check_file, write_file
from attune.common.errors import NoModel
from attune.common.metrics import FALSE_RATES, METRICS
from attune.common.pictures.figures import Section
from attune.common.plan import ONE_MEAN, Plan, run_name
from attune.common.statistics import RIVAL_WORDS, interval_of, strongest
from attune.common.text import clean, listed
from attune.fedserver.core.accuracy import comparisons
from attune.fedserver.core.fleet_verdict import FOR_INTERVAL, FOR_PREDICTION
from attune.fedserver.core.records import Report
from attune.fedserver.ports.ledger import Snapshot
from attune.fedserver.view.status import SENT_WORDS, sent_words, spent_words

AXIS, BESIDE, BELOW = 320, 56, 44  # of the ROC curves: length of the axes, room beside and below them
MOST_DRAWN = 60  # sites with a thin curve
SHOWN = 0.1  # the false positive rate of which the text speaks
CURVE_WORDS: dict[Literal["kept", "alone"], str] = {"kept": "what sites predict with", "alone": "what they can have alone"}
LONGEST = 400  # characters of a text that is not this program's own
DISCLOSED = Path(__file__).parents[2] / "fedclient" / "disclosed.toml"  # the decisions by which devices send anything
RESULTS = {
    "better": "better", "worse": "worse", "unclear": "no difference that so few test samples could show",
    "too few cases": "too few cases",
}  # fmt: skip
STYLE = """
:root { color-scheme: light dark; --ink: #1d2126; --soft: #5b636d; --line: #d5dae0; --page: #fff;
  --up: #1b6e3c; --down: #a3341f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #a0a8b2; --line: #3a424c; --page: #14181d; --up: #62c38b; --down: #ef8b73; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem; margin: 0 auto;
  padding: 1.5rem 1rem 3rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
p, li { max-width: 46rem; } .soft { color: var(--soft); } .answer { font-size: 1.15rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
svg { width: 100%; max-width: 46rem; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .axis { stroke: var(--line); } svg .better { stroke: var(--up); fill: var(--up); }
svg path.axis, svg .kept, svg .alone { fill: none; } svg .kept { stroke: var(--up); } .roc { max-width: 26rem; }
svg .alone { stroke: var(--soft); stroke-dasharray: 6 4; } svg .mean { stroke-width: 3; } svg .site { opacity: .4; }
svg .worse { stroke: var(--down); fill: var(--down); } svg .unclear { stroke: var(--soft); fill: var(--soft); }
.forest { min-width: 34rem; }
@media screen and (max-width: 40rem) {
  body { font-size: 15px; padding: 1rem .7rem; } thead { display: none; } tr { display: block; padding: .4rem 0; }
  tr { border-bottom: 1px solid var(--line); } td { display: block; border: 0; padding: .1rem 0; } td:empty { display: none; }
  td::before { content: attr(data-head) ": "; color: var(--soft); }
}
@media print {
  :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --page: #fff; --up: #1b6e3c; --down: #a3341f; }
  body { max-width: none; padding: 0; font-size: 10.5pt; } h2 { break-after: avoid; } tr, svg { break-inside: avoid; }
  .wide { overflow: visible; }
}
"""


def write_report(out: Path, snapshot: Snapshot, status: Mapping[str, Any], question: str = "") -> Path:
    """Write the page of a run into a file, and return its path.

    Args:
        out: The file.
        snapshot: The ledger's contents.
        status: The object of `fedserver status --json`.
        question: What is to be decided, for the head of the page.

    Raises:
        NoModel: The run has no plan yet.
        SettingError: The file cannot be written.
    """
    check_file(out)
    write_file(out, page_of(snapshot, status, question).encode(), PUBLIC)
    return out


def page_of(snapshot: Snapshot, status: Mapping[str, Any], question: str = "") -> str:
    """Return the page. Arguments and errors are those of `write_report`."""
    plan = snapshot.plan
    if plan is None:
        raise NoModel("there is nothing to report yet: the first round has not started")
    taking_part = [client for client in status["clients"] if client["state"] != "revoked" or client["verdict"]]
    status, name = {**status, "clients": taking_part}, _text(snapshot.settings.server.name or "Federation")
    usual = (
        "How good is the given model at each site?" if plan.given else "Does training together help each site that takes part?"
    )
    asked = question or ("Which site's model serves which site?" if plan.matrix else usual)
    matrix = seams.matrix_section(snapshot.rows, plan.scored, drawn=False)
    bodies = {
        "The answer": _answer(status),
        "The sites": _sites(status, plan) + _curves(snapshot, status),
        **({} if matrix is None else {matrix.title: _matrix(matrix)}),
        "What cannot be said, and why": _items(_limits(status, plan)),
        "What left the sites": _left(snapshot, plan),
        "What was spent": _items(spent_words(status)),
        "How it was made": _made(plan, status),
    }
    sections = (f"<section><h2>{title}</h2>\n{body}\n</section>" for title, body in bodies.items())
    state = "" if status["state"] == "done" else f" It is not over: {_text(status['state'])}."
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
            f"<title>{name}: report</title><style>{STYLE}</style></head><body>",
            f'<header><h1>{name}</h1><p class="answer">{_text(asked)}</p>',
            f'<p class="soft">Run {_text(run_name(snapshot.run))} of {len(status["clients"])} sites.{state}</p></header>',
            f"<main>{''.join(sections)}</main></body></html>\n",
        ]
    )


def _text(value: object) -> str:
    return html.escape(clean(str(value), LONGEST))


def _items(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in heads)
    cells = ([f'<td data-head="{_text(of)}">{_text(cell)}</td>' for of, cell in zip(heads, row, strict=True)] for row in rows)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _answer(status: Mapping[str, Any]) -> str:
    """Return how many sites have which result, and the pooled effects."""
    results = [client["verdict"] for client in status["clients"] if client["verdict"]]
    counts = [f"{RESULTS[result]} at {results.count(result)}" for result in RESULTS if result in results]
    said = f"Of {len(results)} sites with a result: {'; '.join(counts)}." if results else "No site has reported a result."
    over = status.get("auroc")
    pooled = ([f"Pooled, {over['words']}."] if over else []) + [f"Over sites, {one['words']}." for one in status["fleet"]]
    return f'<p class="answer">{_text(said)}</p>{"".join(f"<p>{_text(line)}</p>" for line in pooled)}'


def _sites(status: Mapping[str, Any], plan: Plan) -> str:
    """Return a row for each site, and a picture of the differences."""
    clients, metric = status["clients"], status["metric"]
    areas = plan.score != "auroc" and any(client.get("auroc_kept") is not None for client in clients)
    more = ("AUROC", "AUROC alone", "AUROC, p") if areas else ()
    heads = ("site", "samples to train", "to test", f"{metric} of what it predicts with", f"{metric} alone", "difference", "p")
    rows = []
    for client in clients:
        pair = strongest(client)
        score, samples = client.get("accuracy_kept"), client.get("test_samples")
        trials = None if score is None or not samples else interval_of(score, samples, plan.scored)
        numbers = [_with(score, _area(client) if plan.score == "auroc" else trials), _with(client.get("accuracy_alone"))]
        numbers += ["", ""] if pair is None else [_with(pair.difference, pair.interval(), "+.3f"), f"{pair.p:.2g}"]
        if areas:
            numbers += [
                _with(client.get("auroc_kept"), _area(client)),
                *(_with(client.get(f"auroc_{n}")) for n in ("alone", "p_alone")),
            ]
        result = RESULTS.get(client["verdict"] or "", "no result")
        probably = f"; probably {client['probably']}" if client["probably"] else ""
        rows.append((client["name"], client["samples"] or "", samples or "", *numbers, f"{result}{probably}"))
    caption = (
        f"In brackets: 95 % intervals. alone: {RIVAL_WORDS['alone']} of the site's own samples. p: of the paired test at this "
        "site alone, uncorrected."
    )
    return f'{_table((*heads, *more, "result"), rows)}<p class="soft">{_text(caption)}</p>{_forest(status)}'


def _area(client: Mapping[str, Any]) -> tuple[float, float] | None:
    low, high = client.get("auroc_low"), client.get("auroc_high")
    return None if low is None or high is None else (low, high)


def _with(value: float | None, between: tuple[float, float] | None = None, form: str = ".3f") -> str:
    if value is None:
        return ""
    return f"{value:{form}}" + ("" if between is None else f" ({between[0]:{form}} to {between[1]:{form}})")


def _curves(snapshot: Snapshot, status: Mapping[str, Any]) -> str:
    """Draw the ROC curves of the sites whose AUROC the page has."""
    ranked = {client["name"] for client in status["clients"] if client.get("auroc_kept") is not None}
    return roc_picture(row for name, row in comparisons(snapshot.rows).items() if name in ranked)


ROW, LEFT, WIDTH = 24, 190, 520  # of the picture: height of a row, width of names, width of the axis
MOST_DRAWN = 60  # sites; of more the table alone


def _forest(status: Mapping[str, Any]) -> str:
    """Draw each site's difference with its interval, the pooled one below; empty without any, or with many."""
    compared = ((client, strongest(client)) for client in status["clients"])
    lines = [(client["name"], pair.difference, pair.interval(), client["verdict"]) for client, pair in compared if pair]
    pooled = [one for one in (status.get("auroc"), *status["fleet"]) if one and one["interval"]][:1]
    lines += [("all sites", one["gain"], tuple(one["interval"]), "") for one in pooled]
    if not 0 < len(lines) <= MOST_DRAWN:
        return ""
    most = max(abs(end) for _, _, ends, _ in lines for end in ends) or 1.0
    height = ROW * (len(lines) + 1)

    def at(value: float) -> float:
        return LEFT + WIDTH * (1 + value / most) / 2

    drawn = [f'<line class="axis" x1="{at(0)}" x2="{at(0)}" y1="0" y2="{height - ROW}"/>']
    for row, (name, gain, (low, high), verdict) in enumerate(lines):
        y, kind = ROW * (row + 0.5), verdict if verdict in ("better", "worse") else "unclear"
        x = at(gain)
        diamond = f'<path d="M{x - 7:.1f} {y}L{x:.1f} {y - 6}L{x + 7:.1f} {y}L{x:.1f} {y + 6}Z"/>'
        shape = f'<circle cx="{x:.1f}" cy="{y}" r="4"/>' if verdict else diamond
        drawn.append(
            f'<text x="0" y="{y + 4}">{_text(clean(name, 26))}</text><g class="{kind}">'
            f'<line x1="{at(low):.1f}" x2="{at(high):.1f}" y1="{y}" y2="{y}" stroke-width="2"/>{shape}</g>'
        )
    ends = ((-most, "start"), (0.0, "middle"), (most, "end"))
    drawn += [f'<text x="{at(x):.0f}" y="{height - 6}" text-anchor="{side}">{x:+.3f}</text>' for x, side in ends]
    label = "Difference at each site with its 95 % interval; right of the line is better than alone"
    size = f'class="forest" viewBox="0 0 {LEFT + WIDTH} {height}"'
    picture = f'<svg role="img" aria-label="{label}" {size}>{"".join(drawn)}</svg>'
    return f'<div class="wide">{picture}</div><p class="soft">{label}.</p>'


def _matrix(section: Section) -> str:
    table = section.table
    rows = "" if table is None else _table(table.heads, ([cell or "" for cell in row] for row in table.rows))
    return f'{rows}<p class="soft">{html.escape(clean(section.caption, 20 * LONGEST))}</p>'


def _limits(status: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Yield what the numbers do not say."""
    by_result: dict[Any, list[str]] = {}
    for client in status["clients"]:
        by_result.setdefault(client["verdict"], []).append(client["name"])
    why = {
        "too few cases": "too few cases. Fewer than 10 test samples have one of the classes; the site alone reads how many",
        "unclear": "so few test samples tell no difference of this size from chance, which does not mean that there is none",
        None: "no comparison was reported. The site was away, has no test samples, or tells none (--metrics, --baseline)",
    }
    for result, words in why.items():
        if names := by_result.get(result):
            yield f"{listed(names)}: {words}."
    if names := status["no_better_than_constant"]:
        yield f"{listed(names)}: the model is no better than always giving the most frequent answer."
    if plan.one_sum and plan.task == "classes" and len(plan.classes) == 2:
        yield f"How sites' ROC curves lie: {ONE_MEAN}."
    over = status.get("auroc") or {}
    sites = over.get("sites", sum(strongest(client) is not None for client in status["clients"]))
    if sites < FOR_INTERVAL:
        yield f"How certain the pooled effect is: that needs {FOR_INTERVAL} sites with a result, and {sites} have one."
    if sites < FOR_PREDICTION:
        yield f"What another site would gain: a forecast needs {FOR_PREDICTION} sites with a result."
    yield "The effects are about new samples of these sites and these trained models, not about training again or other sites."
    yield "No figure here says that decisions by these models help anybody: that needs a study of their use."
    if plan.given:
        yield "Nothing was trained, so this says nothing about what training together would bring."


def _left(snapshot: Snapshot, plan: Plan) -> str:
    """Return what devices of this run may send, by the decisions that bind them."""
    rows = [
        (decision["name"], decision["sees"], sent)
        for decision in msgspec.toml.decode(DISCLOSED.read_bytes())["decision"]
        if (sent := sent_words(decision, plan)) != SENT_WORDS["not sent"]
    ]
    totals = {name: sum(getattr(row, name) or 0 for row in snapshot.rows) for name in METRICS if METRICS[name].combine == "sum"}
    moved = f"{totals['bytes_up']:,} bytes of model numbers left the sites, and {totals['bytes_down']:,} were fetched."
    said = f"Rows of data stay at their site. {moved} The table has all that a site may send; its own log has what it sent."
    return f"<p>{_text(said)}</p>{_table(('what', 'who sees it', 'in this run'), rows)}"


def _made(plan: Plan, status: Mapping[str, Any]) -> str:
    outputs, given = listed([str(name) for name in plan.classes]), plan.given and not plan.matrix
    training = f"{plan.method}, {status['round']} of {status['rounds']} rounds"
    if plan.given:
        training = "none: a given model" if given else "none: sites' networks, as they had them"
    rows: list[tuple[str, object]] = [
        ("training", training),
        ("model", plan.model.name),
        ("data", f"{plan.model.kind} of shape {' x '.join(map(str, plan.model.shape))}; {plan.task}: {outputs}"),
        *((what, status[key]) for what, key in (("scales", "standardisation"), ("score", "score")) if status.get(key)),
        *([("given model", plan.given)] if given else []),
        ("federation", plan.federation),
        ("software", f"attune {__version__}"),
    ]
    return _table(("what", "value"), rows)


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean sensitivity of S sites at each of FALSE_RATES; curves: (S, R)."""
    return [fmean(at_rate) for at_rate in zip(*curves, strict=True)]


def roc_picture(rows: Iterable[Report]) -> str:
    """Draw the curves of sites that have reported both, with the mean of each kind; empty without any.

    Args:
        rows: The latest evaluation of each site.
    """
    both = [row.roc for row in rows if row.roc.keys() == CURVE_WORDS.keys()]
    if not both:
        return ""
    drawn = [_line("axis", [0.0, 1.0], [0.0, 1.0]), _line("axis", [0.0, 0.0, 1.0], [1.0, 0.0, 0.0])]
    said = []
    for kind, words in CURVE_WORDS.items():
        curves = [roc[kind] for roc in both]
        mean = mean_curve(curves)
        drawn += [_line(f"{kind} site", (*FALSE_RATES, 1.0), (*curve, 1.0)) for curve in curves[:MOST_DRAWN]]
        drawn.append(_line(f"{kind} mean", (*FALSE_RATES, 1.0), (*mean, 1.0)))
        said.append(f"{mean[FALSE_RATES.index(SHOWN)]:.2f} by {words}")
    drawn += [
        f'<text x="{BESIDE + AXIS / 2:.0f}" y="{AXIS + BELOW - 12}" text-anchor="middle">false positive rate, 0 to 1</text>',
        f'<text x="-{AXIS / 2:.0f}" y="{BESIDE - 24}" text-anchor="middle" transform="rotate(-90)">sensitivity, 0 to 1</text>',
    ]
    sites = f"{len(both)} site{'s' * (len(both) > 1)}"
    label = f"ROC curves: {CURVE_WORDS['kept']} (solid) and {CURVE_WORDS['alone']} (dashed). "
    label += f"Thick: the mean of {sites}, each counted once"
    caption = (
        f"{label}, at each site's own false positive rate. Where {SHOWN:.0%} of those without the event are called, so is this "
        f"share of those with it: {' and '.join(said)}. No test is made of these means."
    )
    size = f'class="roc" viewBox="0 0 {BESIDE + AXIS + 10} {AXIS + BELOW}"'
    return f'<svg role="img" aria-label="{label}" {size}>{"".join(drawn)}</svg><p class="soft">{caption}</p>'


def _line(kind: str, false_R: Sequence[float], true_R: Sequence[float]) -> str:
    points = (f"{BESIDE + AXIS * x:.1f} {6 + AXIS * (1 - y):.1f}" for x, y in zip(false_R, true_R, strict=True))
    return f'<path class="{kind}" d="M{"L".join(points)}"/>'
