// The data, and elements made without ever parsing text as HTML: shared by evaluations and training runs.

const data = JSON.parse(document.getElementById("vf-data").textContent);
const FAILURES = new Set(["environment_error", "provider_error", "grading_error", "timed_out", "cancelled"]);

/** An element: h("p", {class: "note", onclick: f}, "text", child). Strings become text nodes. */
function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** The same for SVG. */
function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined));
  return element;
}

/** The way back to the list of runs, where a server has one. */
function backLink() {
  return data.home ? h("a", { class: "back", href: data.home }, "‹ All runs") : null;
}

/** A number in a few characters: three significant digits. */
function compact(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (value === 0 || (size < 1e6 && Number.isInteger(value))) return value.toLocaleString("en-US");
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size >= 1e-3 ? String(Number(value.toPrecision(3))) : value.toExponential(1).replace(".0e", "e");
}

/** A number for a table: always the same number of decimals. */
function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  const text =
    size >= 1000
      ? Math.round(size).toLocaleString("en-US")
      : size < 1e-3
        ? size.toPrecision(2)
        : size.toFixed(digits);
  return value < 0 ? `−${text}` : text;
}

function signed(value) {
  return value === null || value === undefined
    ? "–"
    : (value > 0 ? "+" : value < 0 ? "−" : "±") + short(Math.abs(value));
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 5400) return `${(value / 3600).toFixed(1)} h`;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms`;
  return value >= 90 ? `${(value / 60).toFixed(1)} min` : `${value.toFixed(value < 10 ? 2 : 0)} s`;
}

function counted(number, noun) {
  return `${short(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** Control characters, and those that turn the direction of text, made visible: what is shown is what is there. */
const UNSEEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2028\u2029\u2060-\u2069\ufeff]/g;
function visible(text) {
  return text.replace(/\r\n/g, "\n").replace(UNSEEN, (character) => {
    const code = character.charCodeAt(0);
    return code === 0x1b ? "\u27e8ESC\u27e9" : `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

/** A table of rows that are elements, under column heads. */
function table(caption, head, rows) {
  return h(
    "table",
    {},
    h("caption", {}, caption),
    h(
      "thead",
      {},
      h(
        "tr",
        {},
        head.map((text) => h("th", { scope: "col" }, text)),
      ),
    ),
    h("tbody", {}, rows),
  );
}
