// Buttons of the operator. Each asks before it acts, and then shows the result.

import { $, h, show } from "./dom.js";
import { ask as request } from "./server.js";
import { date } from "./format.js";

const BUTTONS = { token: ["New device …", askToken, "main"], pause: ["Pause", () => ask("Pause", "No round is opened until you resume. What devices do now goes on.", "pause", {}), ""], resume: ["Resume", () => act("resume", {}).then(tell), "main"] };

export function controls(run, actions) {
  const paused = run.paused;
  const wanted = actions.filter((name) => BUTTONS[name] && !(name === "pause" && paused) && !(name === "resume" && !paused));
  show($("controls"), wanted, (names) => names.map((name) => h("button", { type: "button", class: BUTTONS[name][2] || null, onclick: BUTTONS[name][1] }, BUTTONS[name][0])));
}

async function act(name, body) {
  const answer = await request(`api/actions/${name}`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
  const result = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
  if (!answer.ok) throw new Error(result.error);
  return result;
}

const close = () => $("dialog").close();
const closing = (word = "Close") => h("button", { type: "button", onclick: close }, word);

function open(title, ...children) {
  $("dialog").replaceChildren(h("h2", { id: "dialog-title" }, title), ...children);
  if (!$("dialog").open) $("dialog").showModal();
}

function failed(error) {
  open("It did not work", h("p", { role: "alert" }, error.message), h("div", { class: "row" }, closing()));
}

function tell(result) {
  if (result.said) open("Done", h("p", {}, result.said), h("div", { class: "row" }, closing()));
  else close();
}

function ask(title, words, name, body) {
  const go = h("button", { type: "button", class: name === "revoke" ? "danger" : "main", onclick: () => act(name, body).then(tell, failed) }, title);
  open(`${title}?`, h("form", { onsubmit: (event) => event.preventDefault() }, h("p", {}, words), h("div", { class: "row" }, closing("Cancel"), go)));
}

export const askRevoke = (name) => ask("Revoke", `${name} is shut out for good: its connection ends, its certificate is refused, and its name stays taken.`, "revoke", { name });

function askToken() {
  const uses = h("input", { type: "number", min: 1, max: 1000000, value: 1, required: true }), hours = h("input", { type: "number", min: 1, max: 8760, value: 24, required: true });
  const submit = (event) => {
    event.preventDefault();
    act("token", { uses: Number(uses.value), ttl_s: Number(hours.value) * 3600 }).then(given, failed);
  };
  open("A join token for new devices", h("form", { onsubmit: submit }, h("label", {}, "How many devices may join with it", uses), h("label", {}, "Valid for so many hours", hours), h("div", { class: "row" }, closing("Cancel"), h("button", { class: "main" }, "Make the token"))));
}

function given(result) {
  const line = h("code", { id: "join-line", tabindex: 0 }, result.line);
  const copy = h("button", { type: "button", onclick: () => navigator.clipboard.writeText(result.line).then(() => { copy.textContent = "Copied"; }) }, "Copy");
  open("Run this on the device", h("p", {}, `Whoever has this line can join, as ${result.uses} device${result.uses > 1 ? "s" : ""}, until ${date(result.expires)}. It is shown only now.`), line, h("div", { class: "row" }, copy, closing()));
}
