// Axes over two spans as inline SVG: what every chart begins with.

const WIDTH = 520;
const HEIGHT = 220;
const EDGE = { left: 54, right: 12, top: 12, bottom: 36 };

/** Round numbers that span two values, about so many. */
function ticks([low, high], about) {
  const raw = (high - low) / about || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1)
    found.push(Number((n * step).toPrecision(12)));
  return found;
}

/** Axes over two spans, and functions from values to places. */
function plot(label, xSpan, ySpan, { xTicks, yTicks, xLabel, yLabel }) {
  const right = WIDTH - EDGE.right;
  const bottom = HEIGHT - EDGE.bottom;
  const x = (value) => EDGE.left + ((value - xSpan[0]) / (xSpan[1] - xSpan[0] || 1)) * (right - EDGE.left);
  const y = (value) => bottom - ((value - ySpan[0]) / (ySpan[1] - ySpan[0] || 1)) * (bottom - EDGE.top);
  const root = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const tick of yTicks) {
    root.append(
      svg("line", { class: "grid", x1: EDGE.left, x2: right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: EDGE.left - 6, y: y(tick) + 4, "text-anchor": "end" }, short(tick, 2)),
    );
  }
  for (const tick of xTicks)
    root.append(svg("text", { x: x(tick), y: bottom + 15, "text-anchor": "middle" }, short(tick, 2)));
  root.append(
    svg("line", { class: "axis", x1: EDGE.left, x2: right, y1: bottom, y2: bottom }),
    svg("text", { x: (EDGE.left + right) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, xLabel),
  );
  if (yLabel)
    root.append(
      svg(
        "text",
        {
          class: "y-label",
          x: 10,
          y: (EDGE.top + bottom) / 2,
          transform: `rotate(-90 10 ${(EDGE.top + bottom) / 2})`,
          "text-anchor": "middle",
        },
        yLabel,
      ),
    );
  return { root, x, y, bottom, right };
}

function figure(title, note, drawing) {
  return h(
    "figure",
    {},
    h("figcaption", {}, h("b", {}, title), note ? h("span", { class: "soft" }, ` ${note}`) : null),
    drawing,
  );
}

function ofRun(index) {
  return rollouts.filter((rollout) => rollout.run === index);
}

/** An invisible sheet over a plot that tells which of its columns is pointed at. */
function pointed(place, count, choose, describe) {
  const title = svg("title", {});
  const at = (event) => {
    const box = place.root.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    return Math.max(0, Math.min(count - 1, Math.floor(((x - EDGE.left) / (place.right - EDGE.left)) * count)));
  };
  return svg(
    "rect",
    {
      class: "sheet",
      x: EDGE.left,
      y: EDGE.top,
      width: place.right - EDGE.left,
      height: place.bottom - EDGE.top,
      onmousemove: (event) => count && (title.textContent = visible(describe(at(event)))),
      onclick: (event) => count && choose(at(event)),
    },
    title,
  );
}
