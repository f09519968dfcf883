// Sampled rollouts over time: for each prompt a strip of steps, and the rollouts of the one that is chosen.

const LEVELS = 6;
/** The step that was chosen in a card, by the card's title; other cards show the newest. */
const chosenSteps = new Map();

function samplesSection({ title, note, cards, scale }) {
  const hasStrip = cards.some((card) => card.steps.length > 1);
  return section(
    title,
    note,
    hasStrip ? scaleLegend(scale) : null,
    h(
      "div",
      { class: "cards" },
      cards.map((card) => sampleCard(card, scale, `${title} ${card.title ?? ""}`)),
    ),
  );
}

function scaleLegend([low, high]) {
  const levels = Array.from({ length: LEVELS }, (_, level) => h("i", { class: `l${level}` }));
  return h(
    "p",
    { class: "soft scale" },
    "a square is a step, its colour the mean reward: ",
    h("span", {}, h("b", {}, compact(low)), " ", levels, " ", h("b", {}, compact(high))),
  );
}

function sampleCard(card, scale, key) {
  const panel = h("div", { class: "panel" });
  const strip = h("div", { class: "strip", role: "group", "aria-label": "steps" });
  const choose = (chosen, byHand) => {
    if (byHand) chosenSteps.set(key, card.steps[chosen].step);
    [...strip.children].forEach((button, number) => {
      button.setAttribute("aria-pressed", String(number === chosen));
      button.tabIndex = number === chosen ? 0 : -1;
    });
    panel.replaceChildren(...panelParts(card.steps[chosen]));
  };
  strip.append(
    ...card.steps.map((step, number) => {
      const text = stepText(step);
      return h("button", {
        type: "button",
        class: step.mean === null ? "none" : `l${levelOf(step.mean, scale)}`,
        title: text,
        "aria-label": text,
        onclick: () => choose(number, true),
        onkeydown: (event) => {
          const next = number + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0);
          if (next === number || !card.steps[next]) return;
          event.preventDefault();
          choose(next, true);
          strip.children[next].focus();
        },
      });
    }),
  );
  const before = card.steps.findIndex((step) => step.step === chosenSteps.get(key));
  choose(before < 0 ? card.steps.length - 1 : before, false);
  return h(
    "div",
    { class: "card prompt" },
    card.title ? promptFold(visible(card.title), card, true) : null,
    h("div", { class: "steps" }, card.steps.length > 1 ? strip : null, panel),
  );
}

function levelOf(value, [low, high]) {
  return Math.round(((LEVELS - 1) * (value - low)) / (high - low));
}

function stepText({ step, mean }) {
  return `step ${compact(step)}${mean === null ? "" : `, mean reward ${compact(mean)}`}`;
}

function promptFold(title, { prompt, answer }, open) {
  return h(
    "details",
    { class: "fold", open },
    h("summary", {}, title),
    conversation(prompt ?? []),
    answer ? h("p", { class: "soft" }, "answer: ", h("code", {}, visible(answer))) : null,
  );
}

function panelParts(step) {
  return [
    h("h3", {}, stepText(step)),
    ...step.groups.flatMap((group) => {
      const rollouts = group.rollouts ?? [];
      const title = `prompt ${visible(String(group.example))} · ${rollouts.length} of ${group.generations} rollouts`;
      return [
        group.prompt?.length ? promptFold(title, group, false) : null,
        rolloutColumns(rollouts.map(sampleColumn)),
      ].filter(Boolean);
    }),
  ];
}

function sampleColumn({ reward, advantage, outcome, tokens, error, completion }, number) {
  const sign = advantage > 0 ? "better" : advantage < 0 ? "worse" : "soft";
  const badges = [
    typeof reward === "number" ? h("span", { class: "badge reward" }, `reward ${compact(reward)}`) : null,
    typeof advantage === "number" ? h("span", { class: sign }, `advantage ${signed(advantage)}`) : null,
    outcome === "completed" ? null : outcomeBadge(String(outcome)),
    h("span", { class: "soft" }, `${compact(tokens)} tokens`),
  ];
  return rolloutColumn(`rollout ${number + 1}`, badges.filter(Boolean), error, completion ?? []);
}
