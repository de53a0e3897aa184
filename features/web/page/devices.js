// Row for each device: its accuracies on one scale, verdict, traffic, certificate, and the button that revokes it.

import { $, h, s, show } from "./dom.js";
import { bytes, date, natural, share, span, title } from "./format.js";
import { askRevoke } from "./actions.js";

const SOON_S = 14 * 86400;
const VERDICTS = { better: "helps", worse: "does not help", unclear: "makes no clear difference", "too few cases": "too few cases to tell" };
// [score, word, colour, shape, in the key]; the own model is a common or a personalized one, depending on the method
const MODELS = [
  ["accuracy_local", "local", "local", "square", "a network trained on it alone"], ["accuracy_common", "common", "common", "diamond", "the common model"],
  ["accuracy", "own", "personalized", "circle", "its own model"], ["accuracy_alone", "alone", "alone", "triangle", "the best ordinary model that it fits alone (scikit-learn)"],
  ["accuracy_kept", "kept", "kept", "hexagon", "what it keeps"],
];
const rows = new Map();

const ORDERS = {
  name: (a, b) => natural(a.name, b.name),
  gain: (a, b) => (b.gain ?? -2) - (a.gain ?? -2) || natural(a.name, b.name),
  accuracy: (a, b) => (b.accuracy ?? -1) - (a.accuracy ?? -1) || natural(a.name, b.name),
  tag: (a, b) => natural(a.tag || "\uffff", b.tag || "\uffff") || natural(a.name, b.name),
  expires: (a, b) => (a.expires ?? Infinity) - (b.expires ?? Infinity) || natural(a.name, b.name),
};

export function devices(listed, run, actions) {
  key(run, listed);
  const body = $("devices").tBodies[0];
  const order = [...listed].sort(ORDERS[$("sort").value]);
  for (const name of [...rows.keys()]) if (!listed.some((device) => device.name === name)) { rows.get(name).remove(); rows.delete(name); }
  order.forEach((device, index) => {
    if (!rows.has(device.name)) rows.set(device.name, row(device.name));
    const item = rows.get(device.name);
    if (body.children[index] !== item) body.insertBefore(item, body.children[index] ?? null);
    fill(item, device, actions);
  });
}

function key(run, listed) {
  const intervals = listed.some((device) => device.interval);
  const known = MODELS.filter(([name]) => listed.some((device) => (device[name] ?? null) !== null)).map(([name]) => name);
  show($("score-head"), run.metric, (metric) => `${title(metric)} on its own test part`);
  show($("sort-score"), run.metric, (metric) => metric);
  show($("key"), [run.metric_described, intervals, known], ([described]) => [
    "Of each device's own test part: ",
    ...MODELS.filter(([name]) => known.includes(name)).flatMap(([name, , kind, shape, words]) => [mark(shape, kind), ` ${words}${intervals && name === "accuracy" ? ", with the 95 % interval" : ""}; `]),
    "the grey tick is a constant answer.",
    described === run.metric ? "" : ` ${title(described)}.`, run.metric === "R2" ? " What is below 0 is drawn at 0." : "",
  ]);
}

function mark(shape, kind) {
  return s("svg", { width: 14, height: 14, viewBox: "-7 -7 14 14", role: "img", "aria-label": `${shape}:` }, shaped(shape, 0, 0, kind));
}

function row(name) {
  const cells = ["State", "", "Verdict", "Samples", "Sent", "Work", "Certificate", ""];
  const item = h("tr", {}, h("th", { scope: "row" }, name), ...cells.map((label) => h("td", { "data-label": label || null })));
  item.children[2].className = "plot";
  for (const index of [4, 5, 6]) item.children[index].className = "number";
  return item;
}

function fill(item, device, actions) {
  const [, state, plot, verdict, samples, sent, work, certificate, action] = item.children;
  show(state, [device.stage, device.why, device.note], ([stage, why, note]) => [h("span", { class: `stage ${stage}` }, stage), (why || note) && h("div", { class: "why" }, why || note)]);
  show(plot, [device.interval, device.accuracy_constant, ...MODELS.map(([name]) => device[name])], () => dots(device));
  show(verdict, [device.verdict, device.gain, ranked(device)], ([word, given, area]) => (word ? [h("span", { class: `chip ${word}` }, VERDICTS[word]), given === null ? "" : ` ${given >= 0 ? "+" : "−"}${Math.abs(given).toFixed(3)}`, area && h("div", { class: "why" }, area)] : "–"));
  show(samples, [device.samples, [device.tag, device.variant].filter(Boolean).join(", ")], ([count, kind]) => [String(count ?? "–"), kind && h("div", { class: "why" }, kind)]);
  show(sent, [device.totals.bytes_up ?? 0, device.totals.bytes_down ?? 0], ([up, down]) => [bytes(up), h("div", { class: "why" }, `${bytes(down)} fetched`)]);
  show(work, device.totals.seconds ?? 0, (seconds) => span(seconds));
  show(certificate, device.expires, (until) => expiry(until));
  show(action, [actions.includes("revoke"), device.revoked], ([can, gone]) => (can && !gone ? h("button", { class: "small danger", type: "button", "aria-label": `Revoke ${device.name}`, onclick: () => askRevoke(device.name) }, "Revoke") : ""));
}

function ranked(device) {
  if ((device.auroc_low ?? null) === null) return "";
  const alone = device.auroc_alone === null ? "" : `, alone ${device.auroc_alone.toFixed(3)}, p = ${device.auroc_p_alone.toPrecision(2)}`;
  return `AUROC ${device.auroc_kept.toFixed(3)} (${device.auroc_low.toFixed(3)} to ${device.auroc_high.toFixed(3)})${alone}`;
}

function expiry(until) {
  if (!until || until > 2e11) return "–";
  const left = until - Date.now() / 1000;
  if (left <= 0) return h("span", { class: "soon" }, `expired ${date(until)}`);
  return h("span", { class: left < SOON_S ? "soon" : null }, left < SOON_S ? `expires in ${span(left)}` : date(until));
}

const X = (value) => 6 + Math.max(value, 0) * 188; // R2 below 0 is at the edge; the words say it

function dots(device) {
  const models = MODELS.filter(([name]) => (device[name] ?? null) !== null); // a saved status of an earlier version has fewer
  if (!models.length) return "–";
  const words = models.map(([name, word]) => `${word} ${share(device[name])}`);
  const ticks = [0, 0.5, 1].map((value) => [s("line", { x1: X(value), x2: X(value), y1: 4, y2: 20, stroke: "var(--line)" }), s("text", { x: X(value), y: 32, "text-anchor": "middle" }, String(value))]);
  const interval = device.interval && s("line", { x1: X(device.interval[0]), x2: X(device.interval[1]), y1: 12, y2: 12, stroke: "var(--personalized)", "stroke-width": 3, opacity: 0.35 });
  const constant = device.accuracy_constant !== null && s("line", { x1: X(device.accuracy_constant), x2: X(device.accuracy_constant), y1: 5, y2: 19, stroke: "var(--quiet)", "stroke-width": 2 });
  return s("svg", { class: "dots", viewBox: "0 0 200 34", role: "img", "aria-label": words.join(", ") }, s("title", {}, words.join(", ")),
    s("line", { x1: X(0), x2: X(1), y1: 12, y2: 12, stroke: "var(--line)" }), ...ticks.flat(), interval, constant,
    ...models.map(([name, , kind, shape]) => shaped(shape, X(device[name]), 12, kind)));
}

function shaped(shape, x, y, kind) {
  const fill = `var(--${kind})`;
  if (shape === "circle") return s("circle", { cx: x, cy: y, r: 5, fill });
  if (shape === "square") return s("rect", { x: x - 4, y: y - 4, width: 8, height: 8, fill });
  const corners = { triangle: [[0, -5.5], [5, 4], [-5, 4]], hexagon: [[-2.5, -4.5], [2.5, -4.5], [5, 0], [2.5, 4.5], [-2.5, 4.5], [-5, 0]], diamond: [[0, -5.5], [5.5, 0], [0, 5.5], [-5.5, 0]] }[shape];
  return s("path", { d: `M${corners.map(([right, down]) => `${x + right} ${y + down}`).join("L")}Z`, fill });
}
