// Listens to the server's events, and renders each part again when it has changed.

import { $, h, show } from "./dom.js";
import { follow } from "./server.js";
import { clock } from "./format.js";
import { controls } from "./actions.js";
import { summary } from "./summary.js";
import { devices } from "./devices.js";
import { rounds } from "./rounds.js";
import { attention, draw as drawAttention } from "./attention.js";
import { draw as drawTimeline, legend, setClock, timeline } from "./timeline.js";

const parts = {};
let attendedAfter = null;
let waiting = false;

function render() {
  waiting = false;
  if (!parts.run || !parts.devices) return;
  const actions = parts.caller?.actions ?? [];
  controls(parts.run, actions);
  summary(parts.run, parts.devices);
  timeline(parts.timeline ?? {}, parts.devices);
  devices(parts.devices, parts.run, actions);
  rounds(parts.rounds ?? [], parts.devices, parts.run);
  faults(parts.faults ?? []);
  $("faults-panel").hidden = !parts.faults?.length;
  $("devices-panel").hidden = !parts.devices.length;
  for (const id of ["rounds-panel", "part-panel"]) $(id).hidden = !parts.rounds?.length;
  if (attendedAfter !== parts.run.round) {
    attendedAfter = parts.run.round;
    attention();
  }
}

function faults(entries) {
  show($("faults"), entries, (list) => [...list].reverse().map((fault) => h("li", { class: fault.level }, h("time", { datetime: new Date(fault.at * 1000).toISOString() }, clock(fault.at)), fault.text)));
}

function lost(words) {
  $("connection").hidden = !words;
  $("connection").textContent = words;
}

function take(name) {
  return (data) => {
    parts[name] = JSON.parse(data);
    if (!waiting) { waiting = true; setTimeout(render, 30); }
  };
}

function ended(status) {
  if (status === 401) {
    lost("This tab has no token. Open the address that the server printed at its start; `fedserver dashboard` prints it again.");
    return false;
  }
  lost("The server does not answer. This page tries again by itself; what it shows is the last that it heard.");
}

function busy() {
  lost("Too many pages watch this server: close one of them, and load this one again.");
  return false;
}

const SHOWN = Object.fromEntries(["caller", "run", "devices", "timeline", "rounds", "faults"].map((name) => [name, take(name)]));
const events = { ...SHOWN, busy, clock: (data) => setClock(Number(data)), lost: (data) => lost(JSON.parse(data)), open: () => lost(""), error: ended };

legend();
follow("api/events", events);
for (const id of ["sort", "timeline-span"]) $(id).addEventListener("change", render);
$("unit").addEventListener("change", attention);
setInterval(drawTimeline, 1000);
new ResizeObserver(() => { render(); drawTimeline(); drawAttention(); }).observe($("main"));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawTimeline(); drawAttention(); });
