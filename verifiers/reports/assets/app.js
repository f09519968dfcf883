// The page: three views, what is open, the keyboard, the address, and on a live page the rollouts that come in.

const SEARCH_WAIT_MS = 150;
const POLL_MS = 2000;
const SLICE_MS = 30;
const ORDERS = {
  prompt: ["prompt", null],
  low: ["lowest first", (one, two) => order(one, two, 1)],
  high: ["highest first", (one, two) => order(one, two, -1)],
  long: ["longest first", (one, two) => two.completionTokens - one.completionTokens],
  slow: ["slowest first", (one, two) => (two.seconds ?? -1) - (one.seconds ?? -1)],
};
const view = {
  name: "overview",
  measure: "reward",
  order: isPair ? "low" : "prompt",
  words: "",
  outcome: "",
  run: "",
  low: "",
  high: "",
  matches: null,
  open: null,
};

function order(one, two, sign) {
  const [a, b] = [valueOf(one, view.measure), valueOf(two, view.measure)];
  return a === null || b === null ? (a === null) - (b === null) : sign * (a - b);
}

// ---- lists

const rolloutList = new VirtualList(
  "Rollouts",
  46,
  () =>
    h(
      "div",
      { class: "row" },
      h("span", { class: "row-id" }),
      h("span", { class: "meter" }, h("i")),
      h("span", { class: "row-value" }),
      h("span", { class: "row-outcome" }),
      h("span", { class: "row-words" }),
      h("span", { class: "row-tokens" }),
    ),
  fillRollout,
  (rollout) => openRollout(rollout),
);

function fillRollout(row, rollout) {
  const [id, meter, value, outcome, words, tokens] = row.children;
  const number = valueOf(rollout, view.measure);
  const [low, high] = view.span;
  id.textContent = visible(rollout.id);
  meter.firstChild.style.width =
    number === null ? "0" : `${Math.max(0, Math.min(100, ((number - low) / (high - low)) * 100))}%`;
  meter.classList.toggle("none", number === null);
  value.textContent = number === null ? "–" : short(number, 2);
  outcome.textContent = rollout.outcome === "completed" ? "" : visible(rollout.outcome.replaceAll("_", " "));
  outcome.className = `row-outcome ${kindOf(rollout.outcome)}`;
  words.textContent = rollout.words;
  tokens.textContent = `${short(rollout.completionTokens)} tok`;
}

const promptList = new VirtualList(
  "Prompts",
  46,
  () =>
    h(
      "div",
      { class: "row" },
      h("span", { class: "row-id" }),
      h("span", { class: "squares" }),
      h("span", { class: "row-value" }),
      h("span", { class: "row-words" }),
      h("span", { class: "row-tokens" }),
    ),
  fillPrompt,
  (prompt) => openPrompt(prompt),
);

function fillPrompt(row, prompt) {
  const [id, squares, value, words, tokens] = row.children;
  const [low, high] = view.span;
  id.textContent = visible(prompt.example);
  words.textContent = prompt.words;
  const some = [...prompt.rollouts]
    .sort((one, two) => one.run - two.run || one.generation - two.generation)
    .slice(0, 16);
  squares.replaceChildren(
    ...some.map((rollout) => {
      const number = valueOf(rollout, view.measure);
      const square = h("i", { class: number === null ? "none" : `of-${isPair ? rollout.run : 1}` });
      if (number !== null) square.style.opacity = 0.15 + 0.85 * ((number - low) / (high - low));
      return square;
    }),
  );
  if (isPair) {
    const difference = differenceAt(prompt, view.measure);
    const otherwise = askedOtherwise.has(prompt.example);
    value.textContent = otherwise ? "\u2260" : signed(difference);
    value.title = otherwise ? "asks something else in B: not compared" : "";
    value.className = `row-value ${difference > 0 ? "better" : difference < 0 ? "worse" : ""}`;
  } else {
    value.textContent = short(mean(valuesOf(prompt.rollouts, view.measure)), 2);
  }
  tokens.textContent = counted(prompt.rollouts.length, "rollout");
}

// ---- the frame

const tabs = { overview: "Overview", rollouts: "Rollouts", prompts: isPair ? "Differences" : "Prompts" };
const main = h("main", { id: "main", tabindex: "-1" });
const status = h("span", { class: "soft", role: "status" });
const nav = h(
  "nav",
  { "aria-label": "Views" },
  Object.entries(tabs).map(([name, label]) => h("a", { href: `#${name}`, "data-view": name }, label)),
);
const count = h("span", { class: "count soft", role: "status" });
const words = h("input", {
  type: "search",
  placeholder: "search transcripts  /",
  "aria-label": "Search transcripts",
  oninput: (event) => search(event.target.value),
});
const outcomes = h("select", {
  "aria-label": "Outcome",
  onchange: (event) => change({ outcome: event.target.value }),
});
const sides = isPair
  ? h(
      "select",
      { "aria-label": "Run", onchange: (event) => change({ run: event.target.value }) },
      h("option", { value: "" }, "A and B"),
      h("option", { value: "0" }, "A alone"),
      h("option", { value: "1" }, "B alone"),
    )
  : null;
const low = h("input", {
  type: "number",
  step: "any",
  placeholder: "from",
  "aria-label": "Smallest value",
  oninput: (event) => change({ low: event.target.value }),
});
const high = h("input", {
  type: "number",
  step: "any",
  placeholder: "to",
  "aria-label": "Largest value",
  oninput: (event) => change({ high: event.target.value }),
});
const measures = h("select", {
  "aria-label": "Measure",
  onchange: (event) => change({ measure: event.target.value }),
});
const sorting = h("select", { "aria-label": "Order", onchange: (event) => change({ order: event.target.value }) });
const filters = h(
  "div",
  { class: "filters", role: "search" },
  words,
  outcomes,
  sides,
  h("span", { class: "range" }, measures, low, high),
  sorting,
  count,
);
const detail = h("section", { class: "detail", "aria-label": "Opened", tabindex: "0" });
const close = h(
  "button",
  { type: "button", class: "close", "aria-label": "Close (Esc)", onclick: () => shut() },
  "✕",
);
const browser = h("div", { class: "browser" });
const help = h(
  "dialog",
  { "aria-label": "Keys" },
  h("h2", {}, "Keys"),
  h(
    "dl",
    { class: "keys" },
    [
      ["1 2 3", "overview, rollouts, prompts"],
      ["j k", "next, previous; what is open follows"],
      ["enter", "open"],
      ["/", "search"],
      ["esc", "close, or leave the search"],
      ["g", "from a rollout to its group"],
      ["?", "this"],
    ].map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, text))),
  ),
  h("form", { method: "dialog" }, h("button", {}, "Close")),
);
document
  .getElementById("app")
  .append(
    h(
      "header",
      { class: "top" },
      backLink(),
      h("h1", {}, visible(runs.map((run) => run.title).join("  against  "))),
      h(
        "span",
        { class: "soft when" },
        visible(
          isPair
            ? runs.map((run, index) => `${"AB"[index]} ${run.name}`).join(", ")
            : `${runs[0].name}  ${runs[0].started}`,
        ),
      ),
      status,
      nav,
      h("button", { type: "button", class: "quiet", "aria-label": "Keys", onclick: () => help.showModal() }, "?"),
    ),
    main,
    help,
  );

function fillChoices() {
  const there = [...new Set(rollouts.map((rollout) => rollout.outcome))].sort();
  const option =
    (chosen) =>
    ([value, label]) =>
      h("option", { value, selected: value === chosen }, visible(label));
  outcomes.replaceChildren(
    ...[["", "every outcome"], ...there.map((name) => [name, name.replaceAll("_", " ")])].map(option(view.outcome)),
  );
  measures.replaceChildren(...[...metricNames].map((name) => [name, name]).map(option(view.measure)));
  sorting.replaceChildren(
    ...Object.entries(ORDERS)
      .map(([name, [label]]) => [name, name === "prompt" ? "by prompt" : label])
      .map(option(view.order)),
  );
}

function change(what) {
  Object.assign(view, what);
  view.span = spanOf(view.measure);
  refreshLists();
}

function chosen() {
  const [from, to] = [
    view.low === "" ? -Infinity : Number(view.low),
    view.high === "" ? Infinity : Number(view.high),
  ];
  const ranged = view.low !== "" || view.high !== "";
  return rollouts.filter((rollout) => {
    if (view.outcome && rollout.outcome !== view.outcome) return false;
    if (view.run && String(rollout.run) !== view.run) return false;
    if (view.matches && !view.matches.has(rollout)) return false;
    if (!ranged) return true;
    const value = valueOf(rollout, view.measure);
    return value !== null && value >= from && value <= to;
  });
}

function byPrompt(one, two) {
  return (
    one.example.localeCompare(two.example, "en", { numeric: true }) ||
    one.run - two.run ||
    one.generation - two.generation
  );
}

function refreshLists() {
  const some = chosen();
  const sort = ORDERS[view.order][1];
  if (data.live || sort) some.sort(sort ?? byPrompt);
  const list = view.name === "prompts" ? promptList : rolloutList;
  if (list === rolloutList) rolloutList.show(some);
  else promptList.show(sortedPrompts(new Set(some.map((rollout) => rollout.example))));
  list.redraw();
  const total = view.name === "prompts" ? prompts.size : rollouts.length;
  count.textContent = `${short(list.items.length)} of ${short(total)}${view.searching ? ", searching …" : ""}`;
}

function sortedPrompts(wanted) {
  const found = [...prompts.values()].filter((prompt) => wanted.has(prompt.example));
  const key = (prompt) =>
    isPair ? differenceAt(prompt, view.measure) : mean(valuesOf(prompt.rollouts, view.measure));
  if (view.order === "low" || view.order === "high") {
    const keys = new Map(found.map((prompt) => [prompt, key(prompt) ?? Infinity]));
    const sign = view.order === "high" ? -1 : 1;
    found.sort((one, two) => sign * (keys.get(one) - keys.get(two)) || 0);
  } else if (data.live) {
    found.sort((one, two) => one.example.localeCompare(two.example, "en", { numeric: true }));
  }
  return found;
}

// ---- search

let searchNumber = 0;
let searchTimer = 0;
function search(text) {
  clearTimeout(searchTimer);
  searchTimer = setTimeout(() => findWords(text.trim().toLowerCase()), SEARCH_WAIT_MS);
}

async function findWords(needle) {
  searchNumber += 1;
  const number = searchNumber;
  view.words = needle;
  view.matches = needle ? new Set() : null;
  view.searching = needle !== "";
  let since = performance.now();
  for (let place = 0; needle && place < rollouts.length; place += 1) {
    if (wordsIn(await transcriptOf(rollouts[place])).includes(needle)) view.matches.add(rollouts[place]);
    if (performance.now() - since > SLICE_MS) {
      refreshLists();
      await new Promise((resume) => setTimeout(resume));
      since = performance.now();
    }
    // another search began meanwhile
    if (number !== searchNumber) return;
  }
  view.searching = false;
  refreshLists();
}
