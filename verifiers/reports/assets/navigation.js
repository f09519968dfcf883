// Where the page is: what is open, the address, the keyboard; and on a live page the rollouts that come in.

const go = {
  measure: (measure) => {
    change({ measure });
    draw();
  },
  range: (measure, from, to) => visit("rollouts", { measure, low: tidy(from), high: tidy(to) }),
  outcome: (outcome) => visit("rollouts", { outcome }),
  prompt: (prompt) => openPrompt(prompt),
  rollout: (rollout) => openRollout(rollout),
};

function tidy(number) {
  return String(Number(number.toPrecision(6)));
}

function visit(name, what = {}) {
  view.name = name;
  view.open = null;
  change(what);
  low.value = view.low;
  high.value = view.high;
  history.pushState(null, "", `#${name}`);
  draw();
  focusList();
}

function currentList() {
  return view.name === "prompts" ? promptList : rolloutList;
}

/** Where keys go when nothing is open. */
function focusList() {
  if (view.name === "overview") main.focus({ preventScroll: true });
  else currentList().element.focus({ preventScroll: true });
}

function draw() {
  for (const link of nav.children) {
    if (link.dataset.view === view.name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.className = view.name === "overview" ? "scrolls" : "";
  if (view.name === "overview") {
    const top = main.scrollTop;
    main.replaceChildren(overview(view.measure, go));
    main.scrollTop = top;
    return;
  }
  const list = currentList();
  if (main.firstChild !== browser) main.replaceChildren(browser);
  if (!browser.contains(list.element))
    browser.replaceChildren(
      filters,
      h("div", { class: "split" }, list.element, h("div", { class: "side-detail" }, close, detail)),
    );
  browser.classList.toggle("opened", view.open !== null);
  refreshLists();
}

// ---- opening

/** Opens a rollout; `quietly` when moving along a list, which leaves no trail in the history and takes no focus. */
function openRollout(rollout, quietly = false) {
  return open({ kind: "rollout", item: rollout, id: rollout.id }, quietly, async () =>
    rolloutView(rollout, await transcriptOf(rollout)),
  );
}

function openPrompt(prompt, quietly = false) {
  return open({ kind: "prompt", item: prompt, id: prompt.example }, quietly, async () =>
    groupView(prompt, await Promise.all(prompt.rollouts.map(transcriptOf)), openRollout),
  );
}

async function open(what, quietly, make) {
  view.open = what;
  view.name = `${what.kind}s`;
  const address = `#${what.kind}=${encodeURIComponent(what.id)}`;
  if (location.hash !== address) history[quietly ? "replaceState" : "pushState"](null, "", address);
  draw();
  const list = currentList();
  const place = list.items.indexOf(what.item);
  if (place >= 0) list.activate(place);
  let made;
  try {
    made = await make();
  } catch (error) {
    made = h("p", { class: "notice" }, `This could not be read: ${error.message}`);
  }
  // something else may have been opened while this was read
  if (view.open !== what) return;
  detail.replaceChildren(made);
  detail.scrollTop = 0;
  if (!quietly) detail.focus({ preventScroll: true });
}

function shut() {
  view.open = null;
  history.pushState(null, "", `#${view.name}`);
  draw();
  focusList();
}

/** Shows what the address names. */
function follow() {
  const [name, text] = location.hash.slice(1).split(/=(.*)/s);
  let id = null;
  try {
    id = text === undefined ? null : decodeURIComponent(text);
  } catch {
    // a mistyped address names nothing
  }
  if (name === "rollout" || name === "prompt") {
    const item = (name === "rollout" ? byId : prompts).get(id);
    if (item) return name === "rollout" ? openRollout(item, true) : openPrompt(item, true);
    status.textContent = `${name} ${visible(String(id))} is not on this page`;
    view.name = `${name}s`;
  } else {
    view.name = name in tabs ? name : "overview";
  }
  view.open = null;
  draw();
  // the list gets the focus, unless something else has it
  if (document.activeElement === document.body) focusList();
  return null;
}

// ---- keyboard

function step(by) {
  if (view.name === "overview") return;
  const item = currentList().move(by);
  if (!item || !view.open) return;
  if (view.name === "prompts") openPrompt(item, true);
  else openRollout(item, true);
}

const keys = {
  j: () => step(1),
  k: () => step(-1),
  "?": () => help.showModal(),
  "/": () => {
    if (view.name === "overview") visit("rollouts");
    words.focus();
    words.select();
  },
  g: () => view.open?.kind === "rollout" && openPrompt(prompts.get(view.open.item.example)),
  1: () => visit("overview"),
  2: () => visit("rollouts"),
  3: () => visit("prompts"),
  Enter: (event) => {
    const list = currentList();
    if (view.name === "overview" || event.target.closest("a, button, summary, .detail")) return false;
    const item = list.items[Math.max(0, list.active)];
    if (!item) return false;
    return view.name === "prompts" ? openPrompt(item) : openRollout(item);
  },
  Escape: () => (view.open ? shut() : focusList()),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  const typing = event.target.matches("input, select, textarea");
  if (typing && event.key !== "Escape" && !(event.key === "Enter" && event.target === words)) return;
  if (typing && event.key === "Escape") {
    focusList();
    return;
  }
  const action = Object.hasOwn(keys, event.key) ? keys[event.key] : null;
  if (action && action(event) !== false) event.preventDefault();
});

// ---- live pages

async function poll() {
  let wait = POLL_MS;
  try {
    const answer = await fetch(`rows?from=${received}`);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const news = await answer.json();
    // the file was replaced: what the rows here stand for is gone
    if (news.epoch !== data.epoch || news.rows < received) return location.reload();
    const grown = news.columns.example.length > 0;
    const ended = news.run.finished !== runs[0].finished;
    runs[0] = news.run;
    data.total = news.total;
    if (grown) {
      addColumns(news.columns);
      view.span = spanOf(view.measure);
      fillChoices();
    }
    if (grown || ended) {
      // drawing again would close a choice that is being made
      if (view.name === "overview" && !main.querySelector("select:focus")) draw();
      else if (view.name !== "overview") refreshLists();
      if (grown && view.words) search(view.words);
    }
    status.textContent = runs[0].finished
      ? ""
      : `live: ${short(rollouts.length)}${runs[0].expected ? ` of ${short(runs[0].expected)}` : ""}`;
    if (runs[0].finished && !grown) wait = 5 * POLL_MS;
  } catch {
    status.textContent = "the server does not answer";
    wait = 5 * POLL_MS;
  }
  return setTimeout(poll, document.hidden ? 5 * wait : wait);
}

view.span = spanOf(view.measure);
fillChoices();
window.addEventListener("popstate", follow);
window.addEventListener("hashchange", follow);
follow();
if (data.live) setTimeout(poll, POLL_MS);
