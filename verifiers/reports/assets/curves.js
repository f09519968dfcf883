// Curves over optimizer steps. All charts have one x axis, and tell their values at the step that is pointed at.

const MOST_SERIES_WITH_SPANS = 3;
const MANY_POINTS = 40;
const MANY_EVALUATIONS = 60;
/** The charts on the page. */
let charts = [];

function curveChart(chart, span, marks) {
  const edges = chart.stacked ? stackedEdges(chart.series) : null;
  const ySpan = ySpanOf(chart, edges);
  const place = plot(chart.title, span, ySpan, {
    frame: SMALL,
    xTicks: ticks(span, 6).filter(Number.isInteger),
    yTicks: ticks(ySpan, 4),
  });
  for (const [step, text] of marks) {
    if (step <= span[0] || step >= span[1]) continue;
    const at = { x1: place.x(step), x2: place.x(step), y1: place.top, y2: place.bottom };
    place.root.append(svg("line", { class: "event", ...at }, svg("title", {}, visible(text))));
  }
  const curves = chart.series.filter((series) => !series.errors);
  chart.series.forEach((series, number) => {
    const colour = `c${series.colour}`;
    if (edges) place.root.append(area(place, series.x, edges[number], edges[number + 1], `area ${colour}`));
    else if (series.errors) place.root.append(...evaluationPoints(place, series, colour));
    else if (chart.staircase) place.root.append(staircase(place, series, colour));
    else place.root.append(...curve(place, series, colour, curves.length <= MOST_SERIES_WITH_SPANS));
  });
  const cursor = svg("line", { class: "cursor", y1: place.top, y2: place.bottom, hidden: true });
  place.root.append(cursor);
  const values = chart.series.map(() => h("b", { class: "value" }));
  const label = h("span", { class: "at" });
  const legend = h(
    "ul",
    { class: "legend" },
    chart.series.map((series, number) =>
      h("li", {}, h("i", { class: `key c${series.colour}` }), `${visible(series.name)} `, values[number]),
    ),
  );
  // the legend last, so that drawings beside one another begin at one height whatever its length
  const made = figure(chart.title, chart.note && visible(chart.note), place.root, legend, label);
  made.classList.add("chart");
  charts.push({ chart, place, span, cursor, values, label });
  place.root.addEventListener("pointermove", (event) => {
    const share = (pointOf(place, event)[0] - place.left) / (place.right - place.left);
    pointAt(Math.round(span[0] + Math.min(1, Math.max(0, share)) * (span[1] - span[0])));
  });
  place.root.addEventListener("pointerleave", () => pointAt(null));
  return made;
}

// ---- values at a step

/** The index of the value that is nearest to a step. */
function nearestIndex(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

/** Shows the values at a step in every chart; null shows the last ones. */
function showValues(step) {
  for (const { chart, place, cursor, values, label } of charts) {
    chart.series.forEach((series, number) => {
      values[number].textContent = compact(step === null ? series.y.at(-1) : series.y[nearestIndex(series.x, step)]);
    });
    label.textContent = step === null ? "" : `step ${compact(step)}`;
    cursor.toggleAttribute("hidden", step === null);
    if (step === null) continue;
    cursor.setAttribute("x1", place.x(step));
    cursor.setAttribute("x2", place.x(step));
  }
}

let pointedStep;
function pointAt(step) {
  // many moves of the mouse are one drawing
  if (pointedStep === undefined) {
    requestAnimationFrame(() => {
      showValues(pointedStep);
      pointedStep = undefined;
    });
  }
  pointedStep = step;
}

// ---- drawing

/** The span of the y axis. */
function ySpanOf(chart, edges) {
  const values = chart.fromZero || edges ? [0] : [];
  const withSpans = chart.series.filter((series) => !series.errors).length <= MOST_SERIES_WITH_SPANS;
  if (edges) values.push(...edges.at(-1));
  else
    for (const series of chart.series) {
      if (series.errors)
        series.y.forEach((y, at) => values.push(y - 2 * (series.errors[at] ?? 0), y + 2 * (series.errors[at] ?? 0)));
      else if (withSpans && series.low) values.push(...series.low, ...series.high);
      else values.push(...series.y);
    }
  const [low, high] = [Math.min(...values), Math.max(...values)];
  // a flat curve still needs a scale around it
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  const margin = 0.04 * (high - low);
  return [low === 0 ? 0 : low - margin, high + margin];
}

/** The lower edges of stacked series, and the upper edge of the last. */
function stackedEdges(series) {
  const edges = [new Array(Math.max(...series.map((one) => one.x.length))).fill(0)];
  for (const { y } of series) edges.push(edges.at(-1).map((below, at) => below + (y[at] ?? 0)));
  return edges;
}

/** Means over a twentieth of the values; the values themselves where they are few. */
function smoothed(values) {
  const half = Math.floor(values.length / 40);
  return half < 1 ? values : values.map((value, at) => mean(values.slice(Math.max(0, at - half), at + half + 1)));
}

function corners(place, xs, ys) {
  return xs.map((x, at) => `${place.x(x).toFixed(1)} ${place.y(ys[at]).toFixed(1)}`);
}

function line(place, xs, ys, kind) {
  return svg("path", { class: kind, d: `M${corners(place, xs, ys).join("L")}` });
}

function area(place, xs, low, high, kind) {
  const around = [...corners(place, xs, high), ...corners(place, xs, low).reverse()];
  return svg("path", { class: kind, d: `M${around.join("L")}Z` });
}

function dot(place, x, y, radius, colour) {
  return svg("circle", { class: `dot ${colour}`, cx: place.x(x), cy: place.y(y), r: radius });
}

function curve(place, { x, y, low, high }, colour, withSpan) {
  if (x.length === 1) return [dot(place, x[0], y[0], 3, colour)];
  return [
    ...(withSpan && low ? [area(place, x, low, high, `span ${colour}`)] : []),
    ...(withSpan && x.length > MANY_POINTS ? [line(place, x, y, `raw ${colour}`)] : []),
    line(place, x, smoothed(y), `curve ${colour}`),
  ];
}

function staircase(place, { x, y }, colour) {
  const xs = x.flatMap((step, at) => [step, x[at + 1] ?? step]);
  const ys = y.flatMap((value) => [value, value]);
  return line(place, xs, ys, `curve ${colour}`);
}

function evaluationPoints(place, { x, y, errors }, colour) {
  const radius = x.length <= MANY_EVALUATIONS ? 3.2 : 1.6;
  return [
    line(place, x, y, `thin ${colour}`),
    ...x.flatMap((step, at) => {
      const reach = 2 * (errors[at] ?? 0);
      const ends = { x1: place.x(step), x2: place.x(step), y1: place.y(y[at] - reach), y2: place.y(y[at] + reach) };
      return [
        reach ? svg("line", { class: `whisker ${colour}`, ...ends }) : "",
        dot(place, step, y[at], radius, colour),
      ];
    }),
  ];
}
