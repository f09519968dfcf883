// One rollout as a conversation, with tool calls beside their results; and the rollouts of a prompt side by side.

const FOLDED_CHARACTERS = 8000;
const THINK = /^\s*<think>([\s\S]*?)(?:<\/think>\s*|$)/;

/** Text as it is, folded where it is long. */
function textBlock(text, kind = "") {
  const shown = visible(text);
  if (shown.length <= FOLDED_CHARACTERS) return h("pre", { class: kind }, shown);
  const body = h("pre", { class: kind }, shown.slice(0, FOLDED_CHARACTERS));
  const more = h(
    "button",
    { type: "button", class: "quiet", onclick: unfold },
    `show all ${short(shown.length)} characters`,
  );
  function unfold() {
    body.textContent = shown;
    more.remove();
  }
  return h("div", {}, body, more);
}

function folded(label, text, open = false) {
  return h("details", { class: "fold", open }, h("summary", {}, label), textBlock(text));
}

function callCard(call, result) {
  let given = call.arguments;
  try {
    given = JSON.stringify(JSON.parse(call.arguments), null, 1);
  } catch {
    // shown as the model wrote it
  }
  return h(
    "div",
    { class: "call" },
    h("div", { class: "call-name" }, h("span", { class: "tag" }, "call"), h("code", {}, visible(call.name))),
    given ? textBlock(given) : null,
    h("div", { class: "call-name" }, h("span", { class: "tag" }, "result"), result ? null : h("i", {}, "none")),
    result ? messageBody(result) : null,
  );
}

/** A message's pictures and text. */
function messageBody(message) {
  const pictures = (message.images ?? []).map((source) =>
    h("img", { src: source, alt: "image in the message", loading: "lazy" }),
  );
  return h("div", {}, message.text ? textBlock(message.text) : null, pictures);
}

/** Messages as elements. A result stands with its call: calls wait under their id until a tool answers it. */
function conversation(messages) {
  const results = new Map();
  const taken = new Set();
  for (const [at, message] of messages.entries()) {
    for (const [number, call] of (message.calls ?? []).entries()) {
      // ids may come again in a later turn: the next answer after the call is its own
      const found = messages.findIndex(
        (other, place) => place > at && !taken.has(place) && other.answers === call.id && call.id !== "",
      );
      if (found < 0) continue;
      taken.add(found);
      results.set(`${at}.${number}`, messages[found]);
    }
  }
  return messages.map((message, at) => (taken.has(at) ? null : messageBlock(message, at, results))).filter(Boolean);
}

function messageBlock(message, at, results) {
  const inline = message.role === "assistant" || message.role === "completion" ? THINK.exec(message.text) : null;
  const think = [message.think, inline?.[1]].filter(Boolean).join("\n\n");
  const rest = inline ? { ...message, text: message.text.slice(inline[0].length) } : message;
  const unpaired = message.answers !== undefined ? " (its call is not here)" : "";
  return h(
    "article",
    { class: `message role-${/^[a-z]+$/.test(message.role) ? message.role : "other"}`, "aria-label": message.role },
    h("h4", {}, visible(message.role) + unpaired),
    think ? folded(`reasoning, ${short(think.length)} characters`, think) : null,
    messageBody(rest),
    (message.calls ?? []).map((call, number) => callCard(call, results.get(`${at}.${number}`))),
    !message.text && !think && !message.calls && !message.images ? h("p", { class: "soft" }, "empty") : null,
  );
}

function outcomeBadge(outcome) {
  const kind = FAILURES.has(outcome) ? "bad" : outcome === "completed" ? "" : "some";
  return h("span", { class: `badge ${kind}` }, visible(outcome.replaceAll("_", " ")));
}

function rewardBadge(reward) {
  return h("span", { class: "badge reward" }, reward === null ? "not scored" : `reward ${short(reward)}`);
}

function facts(rollout) {
  const rows = [...rollout.metrics].filter(([, value]) => value !== null && value !== undefined);
  const all = [
    ...rows.map(([name, value]) => [name, short(value)]),
    ["prompt tokens", short(rollout.promptTokens)],
    ["completion tokens", short(rollout.completionTokens)],
    ["time", seconds(rollout.seconds)],
  ];
  return h(
    "dl",
    { class: "facts" },
    all.map(([name, value]) => h("div", {}, h("dt", {}, visible(name)), h("dd", {}, value))),
  );
}

function runMark(rollout) {
  return isPair
    ? h("span", { class: `run run-${rollout.run}`, title: runs[rollout.run].name }, "AB"[rollout.run])
    : null;
}

/** The whole of one rollout. */
function rolloutView(rollout, transcript) {
  const siblings = prompts.get(rollout.example).rollouts;
  return h(
    "div",
    { class: "rollout" },
    h(
      "header",
      {},
      h("h3", {}, runMark(rollout), `prompt ${visible(rollout.example)}, rollout ${rollout.generation}`),
      h(
        "div",
        { class: "badges" },
        rewardBadge(rollout.reward),
        outcomeBadge(rollout.outcome),
        h("a", { class: "quiet", href: `#rollout=${encodeURIComponent(rollout.id)}` }, "permalink"),
        h(
          "a",
          { class: "quiet", href: `#prompt=${encodeURIComponent(rollout.example)}` },
          `its group of ${siblings.length}`,
        ),
      ),
    ),
    facts(rollout),
    transcript.error ? h("div", { class: "error", role: "note" }, textBlock(transcript.error)) : null,
    transcript.answer ? folded("answer", transcript.answer, transcript.answer.length < 400) : null,
    transcript.info ? folded("info", transcript.info) : null,
    h("h4", { class: "divider" }, "prompt"),
    conversation(transcript.prompt),
    h("h4", { class: "divider" }, "completion"),
    transcript.completion.length ? conversation(transcript.completion) : h("p", { class: "soft" }, "no completion"),
  );
}

/** The rollouts of one prompt side by side under their common prompt. */
function groupView(prompt, transcripts, openRollout) {
  const ordered = prompt.rollouts.map((rollout, at) => [rollout, transcripts[at]]);
  // of two runs, A and B stand next to one another
  ordered.sort(([one], [two]) => one.generation - two.generation || one.run - two.run);
  const columns = ordered.map(([rollout, transcript]) =>
    h(
      "section",
      { class: "column", "aria-label": `rollout ${rollout.generation}` },
      h(
        "header",
        {},
        h(
          "button",
          { type: "button", class: "quiet", onclick: () => openRollout(rollout) },
          runMark(rollout),
          `rollout ${rollout.generation}`,
        ),
        rewardBadge(rollout.reward),
        rollout.outcome === "completed" ? null : outcomeBadge(rollout.outcome),
      ),
      transcript.error ? h("div", { class: "error" }, textBlock(transcript.error)) : null,
      conversation(transcript.completion),
    ),
  );
  // two runs may have asked something else under the same id: then there is no common prompt
  const otherwise = askedOtherwise.has(prompt.example);
  const firsts = (otherwise ? runs.map((run, index) => index) : [null])
    .map((index) => [index, ordered.find(([one]) => index === null || one.run === index)?.[1]])
    .filter(([, transcript]) => transcript);
  const sides = runs.map((run, index) =>
    valuesOf(
      prompt.rollouts.filter((one) => one.run === index),
      "reward",
    ),
  );
  const means = sides.map(
    (values, index) => `${isPair ? "AB"[index] + " " : ""}mean ${short(mean(values))} over ${values.length}`,
  );
  return h(
    "div",
    { class: "rollout" },
    h(
      "header",
      {},
      h("h3", {}, `prompt ${visible(prompt.example)}`),
      h(
        "div",
        { class: "badges" },
        means.map((text) => h("span", { class: "badge reward" }, text)),
      ),
    ),
    otherwise ? h("p", { class: "notice" }, "A and B ask something else under this id: they are not compared.") : null,
    firsts.flatMap(([index, transcript]) => [
      h(
        "details",
        { class: "fold", open: true },
        h("summary", {}, `prompt${otherwise ? ` of ${"AB"[index]}` : ""}`),
        conversation(transcript.prompt),
      ),
      transcript.answer ? folded("answer", transcript.answer, transcript.answer.length < 400) : null,
    ]),
    h("div", { class: "columns", tabindex: "0", role: "group", "aria-label": "rollouts side by side" }, columns),
  );
}
