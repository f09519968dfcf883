// Charts as inline SVG. Each says in words what it shows, for those who do not see it.

const BINS = 20;
const MOST_CELL_PROMPTS = 100;
const LABEL_WIDTH = 24;

function ofRun(index) {
  return rollouts.filter((rollout) => rollout.run === index);
}

/** How the values of a measure are distributed; a click on a bar lists its rollouts. */
function histogram(measure, onRange) {
  const span = spanOf(measure);
  const size = (span[1] - span[0]) / BINS;
  const shares = runs.map((run, index) => {
    const counts = new Array(BINS).fill(0);
    const values = valuesOf(ofRun(index), measure);
    for (const value of values) counts[Math.min(BINS - 1, Math.floor((value - span[0]) / size + 1e-9))] += 1;
    return { counts, total: values.length };
  });
  const top = Math.max(
    0.01,
    ...shares.flatMap(({ counts, total }) => counts.map((count) => (total ? count / total : 0))),
  );
  const place = plot(
    `Histogram of ${measure}, ${shares.map((one) => `${one.total} values`).join(" and ")}`,
    span,
    [0, top * 100],
    {
      xTicks: ticks(span, 5),
      yTicks: ticks([0, top * 100], 4),
      xLabel: measure,
      yLabel: "% of rollouts",
    },
  );
  const wide = (place.x(size) - place.x(0)) * 0.86;
  for (let bin = 0; bin < BINS; bin += 1) {
    shares.forEach(({ counts, total }, index) => {
      if (!counts[bin]) return;
      const percent = (counts[bin] / total) * 100;
      const [low, high] = [span[0] + bin * size, span[0] + (bin + 1) * size];
      place.root.append(
        svg(
          "rect",
          {
            class: `bar of-${isPair ? index : 1}`,
            rx: 1.5,
            width: wide / runs.length,
            x: place.x(low) + wide * 0.08 + (index * wide) / runs.length,
            y: Math.min(place.y(percent), place.bottom - 1.5),
            height: Math.max(1.5, place.bottom - place.y(percent)),
            onclick: () => onRange(low, high),
          },
          svg("title", {}, `${counts[bin]} rollouts (${percent.toFixed(1)} %) from ${short(low)} to ${short(high)}`),
        ),
      );
    });
  }
  return figure("Distribution", `of ${visible(measure)}`, place.root);
}

/** Each prompt's rollouts: as cells where there is room for them, else as the curve of the prompts' means. */
function promptStrip(measure, onPrompt) {
  const span = spanOf(measure);
  const all = [...prompts.values()].map((prompt) => ({ prompt, values: valuesOf(prompt.rollouts, measure) }));
  if (isPair) return differenceStrip(measure, onPrompt);
  all.sort((one, two) => (mean(one.values) ?? -Infinity) - (mean(two.values) ?? -Infinity));
  const most = Math.max(...all.map(({ prompt }) => prompt.rollouts.length), 1);
  if (all.length <= MOST_CELL_PROMPTS && most <= 24) return cellStrip(measure, all, most, span, onPrompt);
  const known = all.filter(({ values }) => values.length);
  const place = plot(
    `Mean ${measure} of ${known.length} prompts, from lowest to highest`,
    [0, Math.max(1, known.length)],
    span,
    {
      xTicks: ticks([0, Math.max(1, known.length)], 5),
      yTicks: ticks(span, 4),
      xLabel: "prompts, by their mean",
      yLabel: visible(measure),
    },
  );
  const line = known
    .map(({ values }, at) => `L${place.x(at + 0.5).toFixed(1)} ${place.y(mean(values)).toFixed(1)}`)
    .join("");
  const edge = ({ values }, at, pick) => `${place.x(at + 0.5).toFixed(1)} ${place.y(pick(...values)).toFixed(1)}`;
  const edges = [
    ...known.map((one, at) => edge(one, at, Math.max)),
    ...known.map((one, at) => edge(one, at, Math.min)).reverse(),
  ];
  place.root.append(
    svg("path", { class: "range", d: edges.length ? `M${edges.join("L")}Z` : "" }),
    svg("path", { class: "line", d: line && `M${line.slice(1)}` }),
  );
  place.root.append(
    pointed(
      place,
      known.length,
      (at) => onPrompt(known[at].prompt),
      (at) => `prompt ${known[at].prompt.example}: ${short(mean(known[at].values))}`,
    ),
  );
  return figure("Prompts", "mean, and the range of their rollouts", place.root);
}

/** One column of cells a prompt, the fuller the higher the value. */
function cellStrip(measure, all, most, span, onPrompt) {
  const place = plot(
    `${measure} of each rollout, ${all.length} prompts from lowest to highest mean`,
    [0, all.length],
    [0, most],
    {
      xTicks: [],
      yTicks: [],
      xLabel: "prompts, by their mean",
      yLabel: "rollouts",
    },
  );
  const wide = place.x(1) - place.x(0);
  const high = place.y(0) - place.y(1);
  const gap = Math.min(2, wide * 0.15);
  all.forEach(({ prompt, values }, at) => {
    const column = svg(
      "g",
      { class: "cells", onclick: () => onPrompt(prompt) },
      svg("title", {}, `prompt ${visible(prompt.example)}: ${short(mean(values))} over ${values.length} scored`),
    );
    const ordered = [...prompt.rollouts].sort(
      (one, two) => (valueOf(two, measure) ?? -Infinity) - (valueOf(one, measure) ?? -Infinity),
    );
    ordered.forEach((rollout, row) => {
      const value = valueOf(rollout, measure);
      const share = value === null ? 0 : (value - span[0]) / (span[1] - span[0]);
      const box = {
        x: place.x(at) + gap / 2,
        y: place.y(row + 1) + gap / 2,
        width: Math.max(1, wide - gap),
        height: Math.max(1, high - gap),
        rx: Math.min(2, wide / 6),
      };
      column.append(
        svg("rect", {
          ...box,
          class: value === null ? "cell unscored" : "cell",
          "fill-opacity": value === null ? 1 : (0.1 + 0.9 * share).toFixed(3),
        }),
      );
    });
    place.root.append(column);
  });
  return figure(
    "Prompts",
    "a column each, a cell a rollout; the fuller the colour, the higher; red frame: no score",
    place.root,
  );
}

/** The difference of the two runs, prompt by prompt. */
function differenceStrip(measure, onPrompt) {
  const known = [];
  for (const prompt of prompts.values()) {
    const difference = differenceAt(prompt, measure);
    if (difference !== null) known.push({ prompt, difference });
  }
  known.sort((one, two) => one.difference - two.difference);
  const reach = Math.max(1e-9, ...known.map(({ difference }) => Math.abs(difference)));
  const place = plot(
    `Difference of ${measure} on ${known.length} prompts`,
    [0, Math.max(1, known.length)],
    [-reach, reach],
    {
      xTicks: ticks([0, Math.max(1, known.length)], 5).filter(Number.isInteger),
      yTicks: ticks([-reach, reach], 4),
      xLabel: "prompts, by their difference",
      yLabel: "B − A",
    },
  );
  const down = [];
  const up = [];
  known.forEach(({ difference }, at) =>
    (difference < 0 ? down : up).push(
      `M${place.x(at + 0.5).toFixed(1)} ${place.y(0).toFixed(1)}V${place.y(difference).toFixed(1)}`,
    ),
  );
  const thick = Math.max(0.6, (place.x(1) - place.x(0)) * 0.8).toFixed(2);
  place.root.append(
    svg("path", { class: "stick worse", "stroke-width": thick, d: down.join("") }),
    svg("path", { class: "stick better", "stroke-width": thick, d: up.join("") }),
    svg("line", { class: "axis", x1: place.left, x2: place.right, y1: place.y(0), y2: place.y(0) }),
    pointed(
      place,
      known.length,
      (at) => onPrompt(known[at].prompt),
      (at) => `prompt ${known[at].prompt.example}: ${signed(known[at].difference)}`,
    ),
  );
  return figure("Prompts", `B − A in ${visible(measure)}, one line a prompt`, place.root);
}

function differenceAt(prompt, measure) {
  if (askedOtherwise.has(prompt.example)) return null;
  const sides = [0, 1].map((run) =>
    mean(
      valuesOf(
        prompt.rollouts.filter((one) => one.run === run),
        measure,
      ),
    ),
  );
  return sides.includes(null) ? null : sides[1] - sides[0];
}

/** pass@k with its 95 % band. */
function passCurve() {
  const curves = runs.map((run) => run.passAtK.filter((point) => point.mean !== null));
  const most = Math.max(1, ...curves.flatMap((curve) => curve.map((point) => point.k)));
  const words = curves
    .map((curve) => curve.map((point) => `k=${point.k}: ${short(point.mean)}`).join(", "))
    .join("; ");
  const steps = Math.max(1, Math.log2(most));
  const place = plot(`pass@k: ${words}`, [0, steps], [0, 1], {
    xTicks: [],
    yTicks: [0, 0.25, 0.5, 0.75, 1],
    xLabel: "k",
    yLabel: "pass@k",
  });
  const x = (k) => (most === 1 ? (place.left + place.right) / 2 : place.x(Math.log2(k)));
  const sizes = [...new Set(curves.flatMap((curve) => curve.map((point) => point.k)))].sort((one, two) => one - two);
  sizes.forEach((k, at) => {
    // the largest k may stand close to the power of two before it
    if (at + 1 < sizes.length && x(sizes[at + 1]) - x(k) < LABEL_WIDTH) return;
    place.root.append(svg("text", { x: x(k), y: place.bottom + 15, "text-anchor": "middle" }, String(k)));
  });
  curves.forEach((curve, index) => {
    const kind = `of-${isPair ? index : 1}`;
    const banded = curve.filter((point) => point.low !== null && point.high !== null);
    if (banded.length > 1) {
      const there = banded.map((point) => `${x(point.k)} ${place.y(point.high)}`);
      const back = [...banded].reverse().map((point) => `${x(point.k)} ${place.y(point.low)}`);
      place.root.append(svg("path", { class: `band ${kind}`, d: `M${[...there, ...back].join("L")}Z` }));
    } else {
      banded.forEach((point) =>
        place.root.append(
          svg("line", {
            class: `whisker ${kind}`,
            x1: x(point.k),
            x2: x(point.k),
            y1: place.y(point.low),
            y2: place.y(point.high),
          }),
        ),
      );
    }
    place.root.append(
      svg("path", {
        class: `line ${kind}`,
        d: `M${curve.map((point) => `${x(point.k)} ${place.y(point.mean)}`).join("L")}`,
      }),
    );
    curve.forEach((point) =>
      place.root.append(
        svg(
          "circle",
          { class: `dot ${kind}`, cx: x(point.k), cy: place.y(point.mean), r: 3.5 },
          svg(
            "title",
            {},
            `pass@${point.k} ${short(point.mean)}, 95 % interval ${short(point.low)} to ${short(point.high)}, ${point.prompts} prompts`,
          ),
        ),
      ),
    );
  });
  return figure("pass@k", `right from a reward of ${short(runs[0].rightFrom)}; band: 95 % interval`, place.root);
}

/** Completion length against a measure: each rollout, and the mean of each tenth by length. */
function lengthPlot(measure, onRollout) {
  const known = rollouts.filter((rollout) => valueOf(rollout, measure) !== null);
  const longest = known.reduce((most, rollout) => Math.max(most, rollout.completionTokens), 1);
  const span = spanOf(measure);
  const place = plot(`Length against ${measure} of ${known.length} rollouts`, [0, longest], span, {
    xTicks: ticks([0, longest], 5),
    yTicks: ticks(span, 4),
    xLabel: "completion tokens",
    yLabel: visible(measure),
  });
  runs.forEach((run, index) => {
    const own = known
      .filter((rollout) => rollout.run === index)
      .sort((one, two) => one.completionTokens - two.completionTokens);
    const kind = `of-${isPair ? index : 1}`;
    // thousands of circles would make the page slow; a path of points does not, but a few are needed to show density
    const points = own.map(
      (rollout) =>
        `M${place.x(rollout.completionTokens).toFixed(1)} ${place.y(valueOf(rollout, measure)).toFixed(1)}h0`,
    );
    const layers = own.length > 300 ? 24 : 1;
    for (let layer = 0; layer < layers; layer += 1) {
      const some = points.filter((point, at) => at % layers === layer);
      place.root.append(
        svg("path", {
          class: `points ${kind}`,
          d: some.join(""),
          "stroke-opacity": own.length > 3000 ? 0.05 : layers > 1 ? 0.13 : 0.5,
        }),
      );
    }
    const parts = Math.min(10, Math.floor(own.length / 5));
    const trend = [];
    let from = 0;
    for (let part = 1; part <= parts; part += 1) {
      let to = Math.floor((part * own.length) / parts);
      // rollouts of one length stay together, or the line would rise and fall above that length
      while (to < own.length && own[to].completionTokens === own[to - 1].completionTokens) to += 1;
      if (to <= from) continue;
      const some = own.slice(from, to);
      trend.push(
        `${place.x(mean(some.map((one) => one.completionTokens))).toFixed(1)} ${place.y(mean(valuesOf(some, measure))).toFixed(1)}`,
      );
      from = to;
    }
    if (trend.length > 1) place.root.append(svg("path", { class: `line ${kind}`, d: `M${trend.join("L")}` }));
  });
  place.root.append(sheet(place, { onclick: nearest }));
  function nearest(event) {
    const [atX, atY] = pointOf(place, event);
    let best = null;
    let distance = 144;
    for (const rollout of known) {
      const here = (place.x(rollout.completionTokens) - atX) ** 2 + (place.y(valueOf(rollout, measure)) - atY) ** 2;
      if (here < distance) [best, distance] = [rollout, here];
    }
    if (best) onRollout(best);
  }
  return figure("Length", `against ${visible(measure)}; line: means of tenths`, place.root);
}
