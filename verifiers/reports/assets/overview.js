// The first view: what was run, how it ended, how well it went, and the charts.

function interval(numbers) {
  return numbers.low === null ? "–" : `${short(numbers.low)} … ${short(numbers.high)}`;
}

function measureTable() {
  const rows = runs[0].measures.map((measure) => [measure]);
  if (isPair) {
    for (const measure of runs[1].measures) {
      const row = rows.find(([one]) => one.name === measure.name);
      if (row) row[1] = measure;
      else rows.push([undefined, measure]);
    }
  }
  const head = isPair
    ? ["", "A", "B", "B − A", "95 % interval", "prompts"]
    : ["", "mean", "± stderr", "95 % interval", "prompts", "scored"];
  const body = rows.map(([one, two]) => {
    const name = (one ?? two).name;
    const title = h("th", { scope: "row" }, visible(name));
    if (!isPair) {
      return h(
        "tr",
        {},
        title,
        [short(one.mean), short(one.stderr), interval(one), short(one.prompts), short(one.rollouts)].map((text) =>
          h("td", {}, text),
        ),
      );
    }
    const both = data.difference.measures[name];
    const sure = both && both.low !== null && (both.low > 0 || both.high < 0);
    return h(
      "tr",
      {},
      title,
      h("td", {}, short(one?.mean)),
      h("td", {}, short(two?.mean)),
      h("td", { class: sure ? (both.mean > 0 ? "better" : "worse") : "" }, signed(both?.mean)),
      h("td", {}, both ? interval(both) : "–"),
      h("td", {}, short(both?.prompts)),
    );
  });
  const caption = isPair
    ? "Means of the prompts that both runs scored are compared in B − A"
    : "Means over scored rollouts; errors are clustered by prompt";
  return h("div", { class: "card wide-table measures" }, table(caption, head, body));
}

function outcomeCard(onOutcome) {
  const cards = runs.map((run, index) => {
    const entries = Object.entries(run.outcomes);
    const bar = h(
      "div",
      { class: "outcome-bar", "aria-hidden": "true" },
      entries.map(([outcome, count]) => {
        const part = h("span", { class: kindOf(outcome) });
        part.style.flexGrow = count;
        return part;
      }),
    );
    const names = entries.map(([outcome, count]) =>
      h(
        "li",
        {},
        h(
          "button",
          { type: "button", class: "quiet", onclick: () => onOutcome(outcome) },
          h("span", { class: `swatch ${kindOf(outcome)}`, "aria-hidden": "true" }),
          visible(outcome.replaceAll("_", " ")),
          h("b", {}, short(count)),
        ),
      ),
    );
    return h(
      "div",
      {},
      isPair ? h("div", { class: "soft" }, `${"AB"[index]} ${run.name}`) : null,
      bar,
      h("ul", { class: "outcomes" }, names),
    );
  });
  return h("div", { class: "card" }, h("h3", {}, "Outcomes"), cards);
}

function kindOf(outcome) {
  return outcome === "completed" ? "done" : FAILURES.has(outcome) ? "failed" : "cut";
}

function amountsCard() {
  const rows = runs.map((run, index) =>
    h(
      "div",
      {},
      isPair ? h("b", {}, "AB"[index]) : null,
      factList([
        [
          "rollouts",
          run.expected && !run.finished ? `${short(run.rollouts)} of ${short(run.expected)}` : short(run.rollouts),
        ],
        ["scored", short(run.scored)],
        ["prompts", short(run.prompts)],
        ["prompt tokens", short(run.promptTokens)],
        ["completion tokens", short(run.completionTokens)],
        ["tokens a rollout", run.rollouts ? short(Math.round(run.completionTokens / run.rollouts)) : "–"],
        ["wall time", seconds(run.seconds)],
      ]),
    ),
  );
  return h("div", { class: "card amounts", role: "group", "aria-label": "Amounts" }, rows);
}

function notices() {
  const found = [];
  if (rollouts.length < data.total) {
    found.push(
      `This file holds the rollouts of a sample of prompts: ${short(rollouts.length)} of ${short(data.total)} rollouts. The table counts all of them; charts and lists show the sample. vf-view shows every one.`,
    );
  }
  const failed = runs.reduce((sum, run) => sum + run.rollouts - run.scored, 0);
  runs.forEach((run, index) => {
    const trained = run.promptsTrainedOn;
    if (trained)
      found.push(
        `${isPair ? `${"AB"[index]}: ` : ""}${counted(trained, "prompt")} also trained on: this is not a held-out reward.`,
      );
    else if (trained === null)
      found.push(`${isPair ? `${"AB"[index]}: ` : ""}Not checked whether prompts are training rows too.`);
  });
  if (failed) found.push(`${counted(failed, "rollout")} without a reward: in no mean.`);
  if (!data.live)
    runs.forEach(
      (run, index) =>
        run.finished ||
        found.push(`${isPair ? "AB"[index] : "The run"} was not finished when this page was written.`),
    );
  if (isPair) {
    const { shared, onlyBefore, onlyAfter, settings } = data.difference;
    found.push(
      `${counted(shared, "prompt")} scored in both runs${onlyBefore || onlyAfter ? `; ${short(onlyBefore)} in A alone, ${short(onlyAfter)} in B alone` : ""}.`,
    );
    if (askedOtherwise.size) {
      found.push(
        `${counted(askedOtherwise.size, "prompt")} with another text, answer or task in B under the same id: not compared.`,
      );
    }
    settings.forEach(({ name, before, after }) =>
      found.push(
        `${name} is ${visible(before)} in A and ${visible(after)} in B: rewards may mean something else.`,
      ),
    );
  }
  return found.map((text) => h("p", { class: "notice" }, text));
}

/** Everything of the first view; `go` has what a click leads to. */
function overview(measure, go) {
  const names = [...metricNames];
  const chooser =
    names.length < 2
      ? null
      : h(
          "label",
          { class: "chooser" },
          "charts of ",
          h(
            "select",
            { onchange: (event) => go.measure(event.target.value) },
            names.map((name) => h("option", { value: name, selected: name === measure }, visible(name))),
          ),
        );
  const details = runs.map((run, index) => folded(`run details${isPair ? ` of ${"AB"[index]}` : ""}`, run.metadata));
  return h(
    "div",
    { class: "overview" },
    notices(),
    h("div", { class: "numbers" }, measureTable(), outcomeCard(go.outcome)),
    amountsCard(),
    chooser,
    h(
      "div",
      { class: "charts" },
      histogram(measure, (low, high) => go.range(measure, low, high)),
      promptStrip(measure, go.prompt),
      passCurve(),
      lengthPlot(measure, go.rollout),
    ),
    details,
  );
}
