"use strict";
// Small helpers. Text reaches the page as text nodes alone, never as HTML.

/** An element with attributes and children; strings become text. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

/** A drop-down list of [value, label] pairs. */
function choice(label, options, value, onchange) {
  const select = el("select", { onchange: () => onchange(select.value) });
  for (const [key, text] of options) select.append(el("option", { value: key, selected: key === value }, text));
  return el("label", {}, label, select);
}

/** A box to tick. */
function tick(label, checked, onchange) {
  const box = el("input", { type: "checkbox", checked, onchange: () => onchange(box.checked) });
  return el("label", {}, box, label);
}

/** A number with about four significant digits. */
function show(x) {
  if (x == null || !Number.isFinite(x)) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e5) return short(x);
  if (size >= 1000) return x.toFixed(0);
  if (size >= 100) return x.toFixed(1);
  if (size >= 0.001) return x.toFixed(size >= 10 ? 2 : size >= 0.1 ? 3 : 4);
  return x.toExponential(2);
}

/** A mean and its error, to two digits of the error. */
function showError(mean, error) {
  if (!(error > 0)) return `${show(mean)} ± ${show(error)}`;
  const digits = Math.min(Math.max(1 - Math.floor(Math.log10(error)), 0), 6);
  return `${mean.toFixed(digits)} ± ${error.toFixed(digits)}`;
}

/** A number on an axis. */
function tidy(x) {
  return Math.abs(x) >= 1e4 ? short(x) : String(Number(x.toPrecision(6)));
}

/** A number with a unit: 1.5k, 20M. */
function short(x) {
  if (x == null) return "";
  for (const [size, unit] of [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(x) >= size) return Number((x / size).toPrecision(3)) + unit;
  }
  return String(Number(x.toPrecision(4)));
}

/** Seconds as a duration. */
function duration(seconds) {
  if (seconds < 60) return Number(seconds.toPrecision(3)) + " s";
  if (seconds < 3600) return Number((seconds / 60).toPrecision(3)) + " min";
  return Number((seconds / 3600).toPrecision(3)) + " h";
}

/** A p-value. */
function showP(p) {
  return p < 0.001 ? "p < 0.001" : "p = " + p.toFixed(3);
}

/** A style of the page, such as --ink. */
function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Tones that stand out on white and on dark grey, and from each other for most colour-blind readers.
const COLOURS = ["#3b82c4", "#e07b00", "#2a9d6f", "#d1495b", "#8a6fd1", "#a3742c", "#d05fa5", "#7a8794", "#9aa51b", "#1ba6b5"];

/** The viridis map at eighths, as in Longwall's other heat maps. */
const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99], [170, 220, 50], [253, 231, 37]];

/** The background and the ink of a share from 0 to 1. */
function heat(share) {
  const at = Math.min(Math.max(share, 0), 1) * (VIRIDIS.length - 1);
  const low = Math.min(Math.floor(at), VIRIDIS.length - 2);
  const rgb = VIRIDIS[low].map((a, n) => Math.round(a + (VIRIDIS[low + 1][n] - a) * (at - low)));
  const bright = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140;
  return { background: `rgb(${rgb})`, color: bright ? "#000" : "#fff" };
}

/** The colour of a number from -1 (blue) to 1 (red); 0 is white. */
function diverging(x) {
  const end = x < 0 ? [33, 102, 172] : [178, 24, 43];
  const share = Math.min(Math.abs(x), 1);
  return `rgb(${end.map((colour) => Math.round(255 + (colour - 255) * share))})`;
}
