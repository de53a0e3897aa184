// Title, tiles, and problems that keep the federation from going on.

import { $, h, show } from "./dom.js";
import { bytes, clock, date, share, span, title } from "./format.js";

const STATES = { waiting: "waiting for devices", training: "training", aggregating: "closing the round", done: "done", failed: "failed" };
const KINDS = { server: "", home: "a home, read beside its server", simulation: "a simulation" };
let said = "";

export function summary(run, devices) {
  const state = run.paused ? (run.state === "waiting" ? "paused" : `${run.state}, then paused`) : STATES[run.state] ?? run.state;
  const name = run.name || "Attune";
  $("title").textContent = name;
  document.title = `${run.round}/${run.rounds} ${state} · ${name}`;
  const where = run.running && run.address ? `serving ${run.address}` : run.kind === "simulation" ? "" : "no server runs";
  const method = [run.method, run.model].filter(Boolean).join(" with ");
  const facts = [method, run.run && `run ${run.run}`, KINDS[run.kind], where, run.fingerprint && `authority ${run.fingerprint}`, `version ${run.version}`];
  $("subtitle").textContent = facts.filter(Boolean).join(" · ");
  speak(`${state}, round ${run.round} of ${run.rounds}`);
  show($("summary"), tiles(run, devices, state), (list) => list.map(tile));
  const troubles = [...(run.reason ? [`failed: ${run.reason}`] : []), ...run.troubles];
  for (const [list, said] of Object.entries({ troubles, warnings: run.warnings })) {
    $(list).hidden = !said.length;
    show($(list), said, (lines) => lines.map((line) => h("li", {}, line)));
  }
}

function tiles(run, devices, state) {
  const finished = devices.filter((device) => device.stage === "finished").length;
  const here = devices.filter((device) => device.stage !== "absent").length;
  const verdicts = { better: 0, unclear: 0, worse: 0 };
  for (const device of devices) if (device.verdict) verdicts[device.verdict] += 1;
  const compared = verdicts.better + verdicts.unclear + verdicts.worse;
  const left = run.left_s === null ? "" : `about ${span(run.left_s)} left`;
  const constant = run.constant ? `a constant answer: ${share(run.constant.mean_over_clients)}` : "mean over devices";
  const note = run.state === "waiting" ? `${here} of at least ${run.min_clients} devices` : left;
  return [
    { name: "State", value: state, note: run.adapting.length ? `newcomers: ${run.adapting.join(", ")}` : note },
    { name: "Rounds closed", value: `${run.round} of ${run.rounds}`, bar: [run.round, run.rounds] },
    { name: finished ? "Devices finished" : "Devices here", value: `${finished || here} of ${devices.length}`, note: `${devices.filter((d) => d.revoked).length || "none"} revoked` },
    run.buffer && { name: "Buffer", value: `${run.buffer.filled} of ${run.buffer.size} updates`, bar: [run.buffer.filled, run.buffer.size], note: `buffered rounds; ${run.buffer.staleness === null ? "" : `mean staleness ${run.buffer.staleness.toFixed(1)}, `}${run.buffer.discarded} discarded` },
    run.auto && { name: run.auto.chosen ? "Chosen by auto" : "A race of methods", value: run.auto.chosen ?? run.auto.trains ?? "begins", note: run.auto.words.slice(-2).join("; ") },
    run.accuracy && { name: title(run.metric), value: share(run.accuracy.mean_over_clients), note: constant },
    compared > 0 && { name: "Helped", value: `${verdicts.better} of ${compared}`, note: `${verdicts.unclear} unclear, ${verdicts.worse} not helped` },
    run.fleet.length > 0 && { name: "Probably helped", value: `${run.fleet[0].helped} of ${run.fleet[0].devices}`, note: run.fleet.map((fleet) => `what devices keep ${fleet.words}`).join("; ") },
    run.auroc && { name: "AUROC over alone", value: `${run.auroc.gain >= 0 ? "+" : "−"}${Math.abs(run.auroc.gain).toFixed(3)}`, note: `what devices keep, ${run.auroc.words}` },
    run.privacy && privacy(run.privacy),
    run.bytes_up + run.bytes_down > 0 && { name: "Moved", value: bytes(run.bytes_up + run.bytes_down), note: `${bytes(run.bytes_up)} up, ${bytes(run.bytes_down)} down` },
    run.seconds > 0 && { name: "Work", value: span(run.seconds), note: "of the slowest device of each round" },
    run.disk_free_bytes !== null && { name: "Disk free", value: bytes(Number(run.disk_free_bytes.toPrecision(2))), note: "where the home lies" },
    run.disk_free_bytes !== null && { name: "Last backup", value: run.backup_at ? date(run.backup_at) : "none", note: run.backup_at ? clock(run.backup_at) : "fedserver backup --out DIR" },
  ].filter(Boolean);
}

function privacy({ unit, mode, epsilon, spent, visible, clipping }) {
  const budget = `ε ${spent === null ? "not reported" : spent.toPrecision(3)}${epsilon === null ? "" : ` of ${epsilon}`}`;
  return { name: "Privacy", value: unit === "none" ? mode : budget, note: [...(unit === "none" ? [] : [mode]), visible, ...(clipping ? [clipping.told] : [])].join("; ") };
}

function tile({ name, value, note, bar }) {
  return h("div", { class: "tile" }, h("h2", {}, name), h("p", { class: "value" }, value),
    bar && h("progress", { value: bar[0], max: Math.max(bar[1], 1), "aria-label": name }), note && h("p", { class: "note" }, note));
}

function speak(words) {
  if (words !== said) $("spoken").textContent = words;
  said = words;
}
