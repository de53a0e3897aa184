// Elements from values. Text is always set as text, so that names and notes of devices are never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const shown = new WeakMap();

// Replaces the children of `node` by those that `make` returns, but only if `value` has changed.
export function show(node, value, make) {
  const key = JSON.stringify(value);
  if (shown.get(node) === key) return;
  shown.set(node, key);
  node.replaceChildren(...[make(value)].flat().filter(Boolean));
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
