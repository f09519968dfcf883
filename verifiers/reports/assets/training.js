// A training run: how far it is, what limits its speed, its curves, errors, rollouts and settings.

const POLL_MS = 5000;
const STATUS = {
  finished: ["finished", "good"],
  stopped: ["stopped", "bad"],
  running: [data.live ? "running" : "not ended when this was written", "some"],
};

function section(title, note, ...parts) {
  const heading = h("h2", {}, title, note ? h("span", { class: "soft" }, ` ${note}`) : null);
  return h("section", {}, heading, ...parts);
}

function estimate({ reward, error }) {
  if (!error) return compact(reward);
  // two digits of the error
  const decimals = Math.max(0, 1 - Math.floor(Math.log10(error)));
  return `${reward.toFixed(decimals)} ± ${error.toFixed(decimals)}`;
}

function headFacts({ head }) {
  const rewards = head.rewards.map(compact).join(" → ");
  const evaluations = head.evaluations.flatMap(({ name, last, best }) => [
    [name, estimate(last)],
    [`best ${name}`, best.step === last.step ? null : `${estimate(best)} at step ${compact(best.step)}`],
  ]);
  return factList([
    ["optimizer steps", head.maxSteps === null ? compact(head.steps) : `${compact(head.steps)} of ${compact(head.maxSteps)}`],
    ["training time", seconds(head.seconds)],
    ["reward, first to last", rewards],
    ...evaluations,
    ["tokens sampled", head.sampledTokens ? compact(head.sampledTokens) : null],
    ["failed rollouts", head.failed || head.steps ? compact(head.failed) : null],
  ]);
}

/** What a run learns, or that it learns nothing, above everything that is about its speed. */
function learningCard(found) {
  const kind = found.kind[0].toUpperCase() + found.kind.slice(1);
  return h("div", { class: "card bottleneck" }, h("h2", {}, `${kind}: ${found.text}.`), h("p", {}, `Try: ${found.advice}.`));
}

/** The bottleneck in words, over a bar of the trainer's time. */
function bottleneckCard({ bottleneck, time }) {
  if (!bottleneck) return null;
  const shown = [...time.stages].filter(({ share }) => share >= 0.002).sort((one, two) => two.share - one.share);
  const parts = shown.map(({ name, share, colour }) => {
    const part = h("span", { class: `c${colour}`, title: `${name}: ${(100 * share).toFixed(1)} %` });
    part.style.flexGrow = share;
    return part;
  });
  const legend = shown.map(({ name, share, colour }) =>
    h("li", {}, h("i", { class: `key c${colour}` }), `${name} `, h("b", {}, `${(100 * share).toFixed(0)} %`)),
  );
  const kind = bottleneck.kind[0].toUpperCase() + bottleneck.kind.slice(1);
  return h(
    "div",
    { class: "card bottleneck" },
    h("h2", {}, `${kind}: ${bottleneck.text}.`),
    h("p", {}, `Try: ${bottleneck.advice}.`),
    h("div", { class: "stage-bar", "aria-hidden": "true" }, parts),
    h("ul", { class: "legend" }, legend),
  );
}

function share(value) {
  const fill = h("i");
  fill.style.width = `${100 * Math.min(1, Math.max(0, value))}%`;
  return h("span", { class: "meter", "aria-hidden": "true" }, fill);
}

function timeSection({ time }) {
  if (!time) return null;
  const highest = Math.max(...time.stages.map(({ peakGib }) => peakGib ?? 0));
  const rows = time.stages.map((stage) =>
    h(
      "tr",
      {},
      h(
        "th",
        { scope: "row" },
        h("i", { class: `key c${stage.colour}` }),
        `${stage.name} `,
        h("span", { class: "soft" }, stage.meaning),
      ),
      h("td", {}, share(stage.share), `${(100 * stage.share).toFixed(1)} %`),
      h("td", {}, seconds(stage.seconds)),
      h("td", {}, seconds(stage.seconds / time.steps)),
      h("td", {}, ...(stage.peakGib ? [share(stage.peakGib / highest), `${stage.peakGib.toFixed(2)} GiB`] : ["–"])),
    ),
  );
  const facts = factList([
    ["overlap ratio", time.overlap === null ? "–" : time.overlap.toFixed(2)],
    ["server busy", `${(100 * time.serverBusy).toFixed(0)} %`],
    ["tokens sampled", `${compact(time.sampledPerSecond)} / s`],
    ["tokens trained", `${compact(time.trainedPerSecond)} / s`],
    ["a step", seconds(time.seconds / time.steps)],
  ]);
  const caption = time.memory
    ? `Peak memory: ${visible(time.memory)}, rank 0`
    : "Peak memory is not measured on this system";
  const body = table(caption, ["", "share", "total", "a step", "peak memory"], rows);
  return section("Where time and memory go", "", h("div", { class: "card wide-table" }, facts, body));
}

function errorsSection({ errors }) {
  if (!errors.rows.length) return null;
  const others = errors.leftOut
    ? `; ${counted(errors.leftOut, "rarer error")}, of ${counted(errors.leftOutRollouts, "rollout")}, are left out`
    : "";
  const rows = errors.rows.map(({ text, count, first, last }) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, visible(text)),
      [count, first, last].map((value) => h("td", {}, compact(value))),
    ),
  );
  const body = table(
    `A failed rollout has no reward, and is in no mean${others}`,
    ["", "rollouts", "first step", "last step"],
    rows,
  );
  return section("Failed rollouts by error", "", h("div", { class: "card wide-table" }, body));
}

function settingsSection({ plan, details }) {
  if (!plan && !details.length) return null;
  return section(
    "What was run",
    "",
    plan ? h("div", { class: "card" }, h("h3", {}, "Batch plan"), h("pre", {}, visible(plan))) : null,
    details.map(([label, text]) => h("div", { class: "card" }, folded(label, text))),
  );
}

function trainingParts(run) {
  charts = [];
  const sections = run.sections.map((one) =>
    section(
      one.title,
      "",
      h(
        "div",
        { class: "charts" },
        one.charts.map((chart) => curveChart(chart, run.span, run.marks)),
      ),
    ),
  );
  showValues(null);
  return [
    run.stoppedBy ? h("p", { class: "notice" }, `Stopped by ${visible(run.stoppedBy)}`) : null,
    h("div", { class: "card head" }, headFacts(run)),
    [run.learning, ...run.trends].filter(Boolean).map(learningCard),
    bottleneckCard(run),
    sections.length ? sections : h("p", { class: "notice" }, "Nothing was logged yet."),
    timeSection(run),
    errorsSection(run),
    run.samples.map(samplesSection),
    settingsSection(run),
  ];
}

const badge = h("span", {});
const live = h("span", { class: "soft", role: "status" });
const started = h("span", { class: "soft when" });
const main = h("main", { class: "scrolls", tabindex: "-1" });
const heading = h("h1", {});
document.getElementById("app").append(h("header", { class: "top" }, backLink(), heading, badge, started, live), main);

function draw(run) {
  const [word, kind] = STATUS[run.status] ?? ["", "some"];
  heading.textContent = visible(run.title);
  badge.textContent = word;
  badge.className = word ? `badge ${kind}` : "";
  started.textContent = visible(run.started);
  const unfolded = new Set([...main.querySelectorAll("details[open] > summary")].map((one) => one.textContent));
  const top = main.scrollTop;
  main.replaceChildren(h("div", { class: "overview training" }, trainingParts(run)));
  for (const summary of main.querySelectorAll("details:not([open]) > summary"))
    if (unfolded.has(summary.textContent)) summary.parentElement.open = true;
  main.scrollTop = top;
}

// ---- live pages

let version = data.version;
async function poll() {
  try {
    const answer = await fetch(`training?known=${encodeURIComponent(version)}`);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    live.textContent = "live";
    if (answer.status !== 204) {
      const run = await answer.json();
      version = run.version;
      draw(run);
    }
  } catch {
    live.textContent = "the server does not answer";
  }
  setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

draw(data);
main.focus({ preventScroll: true });
if (data.live) setTimeout(poll, POLL_MS);
