// Matrix of which device learns from which, on a scale from 0 to 1 with a mark at an equal share.

import { $, colour, h, s, show } from "./dom.js";
import { ask as request } from "./server.js";
import { natural, share, short } from "./format.js";

const NAMED = 24;
let present = null;

export async function attention() {
  const unit = $("unit").value;
  const answer = await request(`api/attention?unit=${encodeURIComponent(unit)}`);
  if (!answer.ok) return;
  const data = await answer.json();
  data.names.length && units(data);
  $("unit-label").hidden = data.units.length < 2;
  const known = data.names.length > 0 && data.matrix.length > 0;
  $("attention-panel").hidden = !known;
  show($("attention"), data, () => (known ? matrix(data) : []));
  present = data;
  draw();
}

function units(data) {
  show($("unit"), data.units, (names) => names.map((name) => h("option", { value: name, selected: name === data.unit }, name === "mean" ? "all (mean)" : name)));
}

function matrix(data) {
  const count = data.names.length, equal = 1 / count, labels = short(data.names);
  const canvas = h("canvas", { class: "heat", id: "heat", role: "img", "aria-label": `Weights of ${count} devices; the table below has the largest` });
  canvas.addEventListener("mousemove", (event) => {
    const row = Math.min(count - 1, Math.floor((event.offsetY / canvas.clientHeight) * count)), column = Math.min(count - 1, Math.floor((event.offsetX / canvas.clientWidth) * count));
    canvas.title = `${labels[data.names[row]]} takes ${share(data.matrix[row][column])} from ${labels[data.names[column]]}`;
  });
  return [h("p", { class: "quiet" }, `Row: the device that is served. Column: the device that it learns from. An equal share is ${share(equal)}.`), canvas, bar(equal), h("details", {}, h("summary", {}, "From whom each device takes most"), largest(data, labels))];
}

function bar(equal) {
  const x = (value) => 2 + value * 296, steps = Array.from({ length: 40 }, (_, index) => index / 40);
  return h("div", { class: "bar", "aria-hidden": "true" }, s("svg", { viewBox: "0 0 300 38" }, ...steps.map((value) => s("rect", { x: x(value), y: 8, width: 8, height: 10, fill: `rgb(${colour("heat")})`, "fill-opacity": value + 0.0125 })),
    s("line", { x1: x(equal), x2: x(equal), y1: 3, y2: 22, stroke: "var(--mark)", "stroke-width": 2 }), s("text", { x: x(equal) + 4, y: 34 }, "equal share"),
    equal > 0.12 && s("text", { x: 2, y: 34 }, "0"), s("text", { x: 298, y: 34, "text-anchor": "end" }, "1")));
}

function largest(data, labels) {
  const rows = data.names.map((name, row) => ({ name, others: data.matrix[row].map((weight, column) => [weight, data.names[column]]).filter(([, other]) => other !== name).sort((a, b) => b[0] - a[0]).slice(0, 3), self: data.matrix[row][row] }));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ...["Device", "itself", "then"].map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, ...rows.sort((a, b) => natural(a.name, b.name)).map(({ name, others, self }) => h("tr", {}, h("th", { scope: "row" }, labels[name]), h("td", {}, share(self)), h("td", {}, others.map(([weight, other]) => `${labels[other]} ${share(weight)}`).join(", ")))))));
}

export function draw() {
  const canvas = $("heat");
  if (!canvas || !present?.matrix.length) return;
  const count = present.names.length, pen = canvas.getContext("2d"), cell = Math.max(1, Math.floor(720 / count)), heat = colour("heat"), labels = short(present.names);
  canvas.width = canvas.height = cell * count;
  pen.fillStyle = colour("card");
  pen.fillRect(0, 0, canvas.width, canvas.height);
  present.matrix.forEach((row, y) => row.forEach((weight, x) => {
    pen.fillStyle = `rgba(${heat}, ${weight})`;
    pen.fillRect(x * cell, y * cell, cell, cell);
  }));
  if (count > NAMED) return;
  pen.font = `${Math.min(20, cell / 2)}px system-ui, sans-serif`;
  pen.textBaseline = "middle";
  present.names.forEach((name, index) => {
    pen.fillStyle = present.matrix[index][0] > 0.5 ? colour("card") : colour("text");
    pen.fillText(labels[name].slice(0, 14), 4, (index + 0.5) * cell, cell * Math.max(1, count / 3));
  });
}
