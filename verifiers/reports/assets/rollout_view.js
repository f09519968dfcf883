// One rollout as a whole, and the rollouts of a prompt side by side.

function facts(rollout) {
  const measured = [...rollout.metrics].filter(([, value]) => value !== null && value !== undefined);
  return factList([
    ...measured.map(([name, value]) => [name, short(value)]),
    ["prompt tokens", short(rollout.promptTokens)],
    ["completion tokens", short(rollout.completionTokens)],
    ["time", seconds(rollout.seconds)],
  ]);
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
    answerFold(transcript.answer),
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
    rolloutColumn(
      `rollout ${rollout.generation}`,
      [
        h(
          "button",
          { type: "button", class: "quiet", onclick: () => openRollout(rollout) },
          runMark(rollout),
          `rollout ${rollout.generation}`,
        ),
        rewardBadge(rollout.reward),
        rollout.outcome === "completed" ? null : outcomeBadge(rollout.outcome),
      ],
      transcript.error,
      transcript.completion,
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
      answerFold(transcript.answer),
    ]),
    rolloutColumns(columns),
  );
}
