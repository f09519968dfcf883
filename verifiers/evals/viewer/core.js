// Data, small functions that everything uses, and elements made without ever parsing text as HTML.

const data = JSON.parse(document.getElementById("vf-data").textContent);
const runs = data.runs;
const isPair = runs.length > 1;
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
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Short text of a number. */
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
  return value >= 90 ? `${(value / 60).toFixed(1)} min` : `${value.toFixed(value < 10 ? 1 : 0)} s`;
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

// ---- rollouts

/** All rollouts of the page: in order of prompts in a file, of arrival on a live page. */
const rollouts = [];
const byId = new Map();
const prompts = new Map();
const metricNames = new Set(["reward"]);
let received = 0;

/** Takes further rollouts in; columns as of data.py. */
function addColumns(columns) {
  const names = Object.keys(columns.metrics);
  names.forEach((name) => metricNames.add(name));
  for (let at = 0; at < columns.example.length; at += 1) {
    const rollout = {
      place: received,
      example: columns.example[at],
      generation: columns.generation[at],
      run: columns.run[at],
      outcome: columns.outcome[at],
      reward: columns.reward[at],
      metrics: new Map(names.map((name) => [name, columns.metrics[name][at]])),
      promptTokens: columns.promptTokens[at],
      completionTokens: columns.completionTokens[at],
      seconds: columns.seconds[at],
      words: visible(columns.words[at]),
    };
    const base = `${isPair ? "AB"[rollout.run] + "." : ""}${rollout.example}.${rollout.generation}`;
    received += 1;
    rollout.id = base;
    const before = byId.get(base);
    if (before) {
      // done again while this page is open: the later one counts
      Object.assign(before, rollout);
      continue;
    }
    byId.set(base, rollout);
    rollouts.push(rollout);
    let prompt = prompts.get(rollout.example);
    if (!prompt) {
      prompt = { example: rollout.example, words: visible(columns.prompts[rollout.example] ?? ""), rollouts: [] };
      prompts.set(rollout.example, prompt);
    }
    prompt.rollouts.push(rollout);
  }
}

/** Examples that ask something else in B than in A: side by side, and never compared. */
const askedOtherwise = new Set(data.difference?.askedOtherwise ?? []);

/** A rollout's value of a measure; null where it was not scored. */
function valueOf(rollout, measure) {
  if (rollout.reward === null) return null;
  return measure === "reward" ? rollout.reward : (rollout.metrics.get(measure) ?? null);
}

/** Values of a measure, of scored rollouts alone. */
function valuesOf(some, measure) {
  return some.map((rollout) => valueOf(rollout, measure)).filter((value) => value !== null);
}

/** Smallest and largest value of a measure; at least 0 to 1 where the values lie within. */
function spanOf(measure) {
  let low = 0;
  let high = 0;
  for (const rollout of rollouts) {
    const value = valueOf(rollout, measure);
    if (value !== null && value < low) low = value;
    if (value !== null && value > high) high = value;
  }
  return high <= 1 && low >= 0 ? [0, 1] : [low, high === low ? low + 1 : high];
}

// ---- transcripts

const blocks = new Map();

/** A block of transcripts: parsed from this file, or fetched from the server of a live page. */
async function block(number) {
  const start = number * data.rowsPerBlock;
  const expected = Math.min(data.rowsPerBlock, received - start);
  const known = blocks.get(number);
  if (known && known.rows.length >= expected) return known;
  let found;
  if (data.live) {
    const answer = await fetch(`block/${number}`);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    found = await answer.json();
  } else {
    const element = document.getElementById(`vf-block-${number}`);
    found = JSON.parse(element.textContent);
    // its text is not needed again, and would keep as much memory as what was parsed
    element.remove();
  }
  blocks.set(number, found);
  return found;
}

async function transcriptOf(rollout) {
  const number = Math.floor(rollout.place / data.rowsPerBlock);
  const held = await block(number);
  const row = held.rows[rollout.place % data.rowsPerBlock];
  return { ...row, prompt: held.prompts[row.prompt] };
}

/** Everything said in a transcript, for searching. */
function wordsIn(transcript) {
  const parts = [transcript.answer, transcript.error ?? "", transcript.info, transcript.task];
  for (const message of [...transcript.prompt, ...transcript.completion]) {
    parts.push(message.text, message.think ?? "");
    for (const call of message.calls ?? []) parts.push(call.name, call.arguments);
  }
  return parts.join("\n").toLowerCase();
}

addColumns(data.columns);
