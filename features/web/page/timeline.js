// Activity of each device: a coloured bar up to now, and words.

import { $, colour, h, show } from "./dom.js";
import { clock, natural, short } from "./format.js";

export const STAGES = ["waiting", "downloading", "training", "evaluating", "sending", "absent", "finished"];
const rows = new Map();
let spans = {};
let behind = 0; // seconds by which this machine's clock is behind the server's

export const setClock = (unixMs) => { behind = unixMs / 1000 - Date.now() / 1000; };
const now = () => Date.now() / 1000 + behind;

export function legend() {
  show($("legend"), STAGES, () => STAGES.map((stage) => {
    const swatch = h("span", { class: "swatch" });
    swatch.style.background = `var(--${stage})`;
    return h("li", {}, swatch, stage);
  }));
}

export function timeline(history, devices) {
  spans = history;
  const names = devices.map((device) => device.name).sort(natural);
  $("timeline-panel").hidden = !Object.keys(history).length;
  const list = $("timeline"), labels = short(names);
  for (const name of [...rows.keys()]) if (!names.includes(name)) { rows.get(name).item.remove(); rows.delete(name); }
  for (const name of names) if (!rows.has(name)) rows.set(name, row(name));
  list.replaceChildren(...names.map((name) => rows.get(name).item), axis());
  for (const device of devices) {
    const { name, words } = rows.get(device.name);
    name.textContent = labels[device.name];
    const progress = device.progress !== null && device.stage === "training" ? ` ${Math.round(device.progress * 100)} %` : "";
    show(words, [device.stage, progress, device.why], ([stage, done, why]) => [h("b", {}, stage + done), why ? ` · ${why}` : ""]);
    words.title = device.why;
  }
  draw();
}

function row(name) {
  const label = h("span", { class: "name", title: name }), canvas = h("canvas", { "aria-hidden": "true" }), words = h("span", { class: "now" });
  canvas.addEventListener("mousemove", (event) => { canvas.title = at(name, event.offsetX / canvas.clientWidth); });
  return { item: h("li", {}, label, canvas, words), name: label, canvas, words };
}

function axis() {
  const width = Number($("timeline-span").value);
  return h("li", { class: "times", "aria-hidden": "true" }, h("span"), h("span", { class: "axis" }, h("span", {}, clock(now() - width)), h("span", {}, "now")), h("span"));
}

function at(name, fraction) {
  const width = Number($("timeline-span").value), moment = now() - width * (1 - fraction);
  const entry = (spans[name] ?? []).filter((span) => span[1] <= moment).at(-1);
  return entry ? `${entry[0]} since ${clock(entry[1])}${entry[2] ? `: ${entry[2]}` : ""}` : "";
}

export function draw() {
  const width = Number($("timeline-span").value), end = now(), begin = end - width;
  const colours = Object.fromEntries(STAGES.map((stage) => [stage, colour(stage)]));
  for (const [name, { canvas }] of rows) {
    const scale = window.devicePixelRatio || 1;
    if (!canvas.clientWidth) continue;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = canvas.clientHeight * scale;
    const pen = canvas.getContext("2d"), x = (unix) => ((Math.max(unix, begin) - begin) / width) * canvas.width;
    const list = spans[name] ?? [];
    list.forEach(([stage, from], index) => {
      const until = index + 1 < list.length ? list[index + 1][1] : end;
      if (until < begin) return;
      pen.fillStyle = colours[stage];
      pen.fillRect(x(from), 0, Math.max(x(until) - x(from), scale), canvas.height);
    });
  }
}
