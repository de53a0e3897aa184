// Numbers and times as words.

export const title = (words) => words[0].toUpperCase() + words.slice(1);
export const share = (value, digits = 3) => (value === null || value === undefined ? "–" : value.toFixed(digits));

export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let value = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 1000) return `${unit === "B" ? value : value.toPrecision(3)} ${unit}`;
    value /= 1000;
  }
  return `${value.toPrecision(3)} TB`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 90) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const clock = (unix) => new Date(unix * 1000).toLocaleTimeString([], { hour12: false });
export const date = (unix) => new Date(unix * 1000).toLocaleDateString([], { year: "numeric", month: "short", day: "numeric" });

// The beginning that all names share, up to a hyphen or underscore, is left out.
export function short(names) {
  let common = names.length > 1 ? names[0] : "";
  for (const name of names) while (!name.startsWith(common)) common = common.slice(0, -1);
  const cut = Math.max(common.lastIndexOf("-"), common.lastIndexOf("_")) + 1;
  return Object.fromEntries(names.map((name) => [name, name.slice(cut) || name]));
}

export const natural = (a, b) => a.localeCompare(b, undefined, { numeric: true });
