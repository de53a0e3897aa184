// Rounds as curves, as a table, and with the devices that took part in each.

import { $, h, s, show } from "./dom.js";
import { bytes, natural, share, short, span, title } from "./format.js";

const SERIES = [["before", "as served", "--downloading"], ["after", "after local training", "--sending"], ["accuracy", "evaluated", "--personalized"], ["common", "common model", "--common"], ["alone", "best ordinary model alone", "--alone"], ["kept", "what devices keep", "--kept"]];
const WIDE = [560, 190], NARROW = [290, 130], LEFT = 54, BOTTOM = 22, TOP = 8;
const LISTED = 20;

// Charts of single metrics take their format by unit, and their colours in this order.
const FORMATS = { bytes, s: (value) => span(value) };
const COLOURS = ["--training", "--evaluating", "--sending", "--downloading"];

export function rounds(history, devices, run) {
  const wide = $("charts").clientWidth >= WIDE[0] * 0.75; // on less, the words in a wide figure are too small to read
  show($("charts"), [wide, run.charts, history.map((line) => ({ ...line, trained: 0, evaluated: 0 }))], () => (history.length ? charts(history, run, wide) : []));
  show($("round-table"), [history.slice(-LISTED), run.charts], ([lines, metrics]) => table(lines, metrics));
  show($("part"), [history.slice(-60), devices.map((device) => device.name)], ([lines, names]) => part(lines, [...names].sort(natural)));
}

function charts(history, run, wide) {
  const present = SERIES.filter(([name]) => history.some((line) => line[name] !== null));
  const metrics = run.charts.map((metric, index) => ({ ...metric, colour: COLOURS[index % COLOURS.length] }));
  return [
    chart(`${title(run.metric)}, mean over devices`, history, present.map(([name, label, colour]) => ({ name, label, colour })), { top: 1, format: (v) => share(v, 2), wide }),
    ...[...new Set(metrics.map((metric) => metric.chart))].map((heading) => {
      const series = metrics.filter((metric) => metric.chart === heading);
      const labelled = series.map(({ name, title: label, colour }) => ({ name, label: series.length > 1 ? label : undefined, colour }));
      return chart(heading, history, labelled, { format: FORMATS[series[0].unit] ?? ((v) => v.toPrecision(2)) });
    }),
  ];
}

function chart(heading, history, series, { top, format, wide }) {
  const [W, H] = wide ? WIDE : NARROW;
  const known = series.flatMap(({ name }) => history.map((line) => line[name]).filter((value) => value !== null));
  if (!known.length) return null;
  const high = top ?? (Math.max(...known) || 1), last = Math.max(history.at(-1).round, history[0].round + 1), first = history[0].round;
  const x = (round) => LEFT + ((round - first) / (last - first)) * (W - LEFT - 8), y = (value) => TOP + (1 - Math.max(value, 0) / high) * (H - TOP - BOTTOM);
  const grid = [0, 0.5, 1].map((part) => [s("line", { x1: LEFT, x2: W - 8, y1: y(part * high), y2: y(part * high) }), s("text", { x: LEFT - 6, y: y(part * high) + 4, "text-anchor": "end" }, format(part * high))]);
  const lines = series.map(({ name, colour }) => curve(history.filter((line) => line[name] !== null).map((line) => [x(line.round), y(line[name])]), colour));
  const latest = series.map(({ name, label }) => [label, history.filter((line) => line[name] !== null).at(-1)?.[name]]).filter(([, value]) => value !== undefined);
  const words = `${heading}: ${latest.map(([label, value]) => `${label ? `${label} ` : ""}${format(value)}`).join(", ")} after round ${last}`;
  return h("figure", { class: wide ? "wide" : null },
    h("figcaption", {}, heading, ...series.filter(({ label }) => label).map(({ label, colour }) => { const box = h("span", { class: "swatch" }); box.style.background = `var(${colour})`; box.style.marginLeft = ".7rem"; return h("span", { class: "together" }, box, label); })),
    s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": words }, s("g", { class: "grid" }, ...grid.flat()), ...lines,
      s("text", { x: LEFT, y: H - 5 }, `round ${first}`), s("text", { x: W - 8, y: H - 5, "text-anchor": "end" }, String(last))));
}

function curve(points, colour) {
  const path = points.map(([px, py], index) => `${index ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
  const marks = points.length <= 40 ? points.map(([px, py]) => s("circle", { cx: px, cy: py, r: 2.6, fill: `var(${colour})` })) : [];
  return s("g", {}, s("path", { d: path, fill: "none", stroke: `var(${colour})`, "stroke-width": 2, "stroke-linejoin": "round" }), ...marks);
}

function table(lines, metrics) {
  const heads = ["Round", "Answers", "As served", "After training", "Evaluated", ...metrics.map((metric) => title(metric.title))];
  const cells = (line) => [line.answers, share(line.before), share(line.after), share(line.accuracy), ...metrics.map(({ name, unit }) => (FORMATS[unit] ?? share)(line[name]))];
  return h("table", {}, h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col", class: "number" }, head)))),
    h("tbody", {}, ...[...lines].reverse().map((line) => h("tr", {}, h("th", { scope: "row", class: "number" }, String(line.round)), ...cells(line).map((cell) => h("td", { class: "number" }, String(cell)))))));
}

function part(lines, names) {
  if (!lines.length || !names.length) return [];
  const labels = short(names), sets = lines.map((line) => ({ trained: new Set(line.trained), evaluated: new Set(line.evaluated) }));
  const step = Math.ceil(lines.length / 12);
  const head = h("tr", {}, h("td"), ...lines.map((line, index) => h("th", { scope: "col" }, index % step && index + 1 < lines.length ? h("span", { class: "hidden" }, String(line.round)) : String(line.round))));
  const body = names.map((name) => h("tr", {}, h("th", { scope: "row", title: name }, labels[name]), ...sets.map(({ trained, evaluated }) => {
    const words = [trained.has(name) && "trained", evaluated.has(name) && "evaluated"].filter(Boolean);
    return h("td", {}, words.length ? h("i", { class: words.join(" ") }) : null, h("span", { class: "hidden" }, words.join(" and ") || "no"));
  })));
  return h("table", { class: "part" }, h("thead", {}, head), h("tbody", {}, ...body));
}
