// The rollouts of an evaluation or two: their numbers, and their transcripts when they are asked for.

const runs = data.runs;
const isPair = runs.length > 1;


/** All rollouts of the page: in order of prompts in a file, of arrival on a live page. */
const rollouts = [];
const byId = new Map();
const prompts = new Map();
const metricNames = new Set(["reward"]);
let received = 0;

/** Takes further rollouts in; columns as of evaluation.py. */
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
