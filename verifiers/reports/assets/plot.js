// Axes over two spans as inline SVG: what every chart begins with.

const WIDE = { width: 520, height: 220, left: 54, right: 12, top: 12, bottom: 36 };
const SMALL = { width: 420, height: 180, left: 46, right: 8, top: 8, bottom: 22 };

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
function plot(label, xSpan, ySpan, { xTicks, yTicks, xLabel, yLabel, frame = WIDE }) {
  const { width, height, left, top } = frame;
  const right = width - frame.right;
  const bottom = height - frame.bottom;
  const x = (value) => left + ((value - xSpan[0]) / (xSpan[1] - xSpan[0] || 1)) * (right - left);
  const y = (value) => bottom - ((value - ySpan[0]) / (ySpan[1] - ySpan[0] || 1)) * (bottom - top);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const tick of yTicks) {
    root.append(
      svg("line", { class: "grid", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
      svg("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, compact(tick)),
    );
  }
  for (const tick of xTicks)
    root.append(svg("text", { x: x(tick), y: bottom + 15, "text-anchor": "middle" }, compact(tick)));
  root.append(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  if (xLabel) root.append(svg("text", { x: (left + right) / 2, y: height - 5, "text-anchor": "middle" }, xLabel));
  if (yLabel) {
    const middle = (top + bottom) / 2;
    root.append(
      svg("text", { x: 10, y: middle, transform: `rotate(-90 10 ${middle})`, "text-anchor": "middle" }, yLabel),
    );
  }
  return { root, x, y, left, top, right, bottom, width, height };
}

function figure(title, note, ...drawing) {
  return h(
    "figure",
    {},
    h("figcaption", {}, h("b", {}, title), note ? h("span", { class: "soft" }, ` ${note}`) : null),
    drawing,
  );
}

/** An invisible sheet over a plot, which takes what happens to the mouse. */
function sheet(place, handlers, ...children) {
  const { left, top, right, bottom } = place;
  return svg(
    "rect",
    { class: "sheet", x: left, y: top, width: right - left, height: bottom - top, ...handlers },
    ...children,
  );
}

/** Where an event is on a plot, in the plot's own units. */
function pointOf(place, event) {
  const box = place.root.getBoundingClientRect();
  return [
    ((event.clientX - box.left) / box.width) * place.width,
    ((event.clientY - box.top) / box.height) * place.height,
  ];
}

/** A sheet that tells which of a plot's columns is pointed at. */
function pointed(place, count, choose, describe) {
  const title = svg("title", {});
  const at = (event) => {
    const share = (pointOf(place, event)[0] - place.left) / (place.right - place.left);
    return Math.max(0, Math.min(count - 1, Math.floor(share * count)));
  };
  return sheet(
    place,
    {
      onmousemove: (event) => count && (title.textContent = visible(describe(at(event)))),
      onclick: (event) => count && choose(at(event)),
    },
    title,
  );
}
