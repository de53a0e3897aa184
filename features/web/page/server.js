// Requests to the server. The token stays in this tab: a browser would send a cookie to other ports of the host, too.

const KEPT = "attune-token", PAUSE_MS = 3000;
const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem(KEPT, given);
  history.replaceState(null, "", location.pathname + location.search);
}

export function ask(path, options = {}) {
  return fetch(path, { ...options, headers: { ...options.headers, authorization: `Bearer ${sessionStorage.getItem(KEPT) ?? ""}` } });
}

// Calls on[name](data) for each event of a stream, on.open() when the stream begins, and on.error(status) when it has ended.
// The stream begins again after a pause, unless a function returns false.
export async function follow(path, on) {
  for (;;) {
    let status = 0, goesOn = true;
    try {
      const answer = await ask(path);
      status = answer.status;
      if (answer.ok) {
        on.open();
        goesOn = await read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), on);
      }
    } catch { /* the connection has ended: on.error says so */ }
    if (!goesOn || on.error(status) === false) return;
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

async function read(reader, on) {
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return true;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const field = (name) => block.split("\n").filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
      if (on[field("event")]?.(field("data")) === false) {
        await reader.cancel();
        return false;
      }
    }
  }
}
