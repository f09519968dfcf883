// Transcripts as conversations, with tool calls beside their results.

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

/** What a prompt's answer is, open where it is short. */
function answerFold(answer) {
  return answer ? folded("answer", answer, answer.length < 400) : null;
}

/** One of the rollouts that stand side by side: its badges, its error, and what was said. */
function rolloutColumn(label, badges, error, messages) {
  return h(
    "section",
    { class: "column", "aria-label": label },
    h("header", {}, badges),
    error ? h("div", { class: "error" }, textBlock(error)) : null,
    messages.length || error ? conversation(messages) : h("p", { class: "soft" }, "empty"),
  );
}

function rolloutColumns(columns) {
  return h("div", { class: "columns", tabindex: "0", role: "group", "aria-label": "rollouts side by side" }, columns);
}

/** Numbers with their names; `rows` are pairs, of which those without a value are left out. */
function factList(rows) {
  const known = rows.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h(
    "dl",
    { class: "facts" },
    known.map(([name, value]) => h("div", {}, h("dt", {}, visible(name)), h("dd", {}, value))),
  );
}
