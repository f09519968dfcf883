// Values at the step under the mouse in every chart at once, and one step of sampled rollouts at a time.

const charts = [...document.querySelectorAll("figure.chart")].map((figure) => {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const values = [...figure.querySelectorAll(".value")];
  const label = document.createElement("span");
  label.className = "at";
  figure.append(label);
  return { figure, data, values, label, lasts: values.map((value) => value.textContent), cursor: figure.querySelector(".cursor") };
});

function short(value) {
  if (value === undefined || value === null) return "–";
  const size = Math.abs(value);
  if (value === 0 || (size < 1e6 && Number.isInteger(value))) return value.toLocaleString("en-US");
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return size >= 1e-3 ? String(Number(value.toPrecision(3))) : value.toExponential(1).replace(".0e", "e");
}

/** The place of the value that is nearest to a step. */
function nearest(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
}

function show(step) {
  for (const { data, values, label, lasts, cursor } of charts) {
    if (step === null) {
      values.forEach((value, number) => (value.textContent = lasts[number]));
      label.textContent = "";
      cursor.setAttribute("hidden", "");
      continue;
    }
    data.curves.forEach(([steps, numbers], number) => {
      values[number].textContent = steps.length ? short(numbers[nearest(steps, step)]) : "–";
    });
    label.textContent = `step ${short(step)}`;
    const x = data.left + ((step - data.span[0]) / (data.span[1] - data.span[0] || 1)) * (data.right - data.left);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.removeAttribute("hidden");
  }
}

let asked = null;
function ask(step) {
  if (asked === null) requestAnimationFrame(() => { show(asked.step); asked = null; });
  asked = { step };
}

for (const { figure, data } of charts) {
  const drawing = figure.querySelector("svg");
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * data.width;
    const share = Math.min(1, Math.max(0, (x - data.left) / (data.right - data.left)));
    ask(Math.round(data.span[0] + share * (data.span[1] - data.span[0])));
  });
  drawing.addEventListener("pointerleave", () => ask(null));
}

for (const steps of document.querySelectorAll(".steps")) {
  const buttons = [...steps.querySelectorAll(":scope > .strip > button")];
  const panels = [...steps.querySelectorAll(":scope > .panel")];
  if (!buttons.length) continue;
  const choose = (chosen) => {
    buttons.forEach((button, number) => {
      button.setAttribute("aria-pressed", String(number === chosen));
      button.tabIndex = number === chosen ? 0 : -1;
    });
    panels.forEach((panel, number) => (panel.hidden = number !== chosen));
  };
  buttons.forEach((button, number) => {
    button.addEventListener("click", () => choose(number));
    button.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const next = number + (move ?? 0);
      if (!move || !buttons[next]) return;
      event.preventDefault();
      choose(next);
      buttons[next].focus();
    });
  });
  choose(buttons.length - 1);
}
