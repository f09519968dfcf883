// A list of any length: only the rows in view exist as elements.

const SPARE_ROWS = 6;

class VirtualList {
  /**
   * @param {string} label - what a screen reader calls the list
   * @param {number} rowHeight - in pixels, the same for all
   * @param {() => HTMLElement} make - a row's element with its parts, without content
   * @param {(element: HTMLElement, item: object) => void} fill - puts an item into it
   * @param {(item: object) => void} open - called on Enter and on a click
   */
  constructor(label, rowHeight, make, fill, open) {
    Object.assign(this, { rowHeight, make, fill, open, items: [], active: -1, rows: [], pending: false });
    this.space = h("div", { class: "space", role: "presentation" });
    this.element = h(
      "div",
      {
        class: "list",
        role: "listbox",
        tabindex: "0",
        "aria-label": label,
        onscroll: () => this.schedule(),
        onkeydown: (event) => this.onKey(event),
        onclick: (event) => this.onClick(event),
      },
      this.space,
    );
    new ResizeObserver(() => this.schedule()).observe(this.element);
  }

  /** Shows other items; the active one stays active where it is still among them. */
  show(items) {
    const before = this.items[this.active];
    this.items = items;
    this.active = before ? items.indexOf(before) : -1;
    this.space.style.height = `${items.length * this.rowHeight}px`;
    this.redraw();
  }

  redraw() {
    this.rows.forEach((row) => (row.vfPlace = -1));
    this.draw();
  }

  schedule() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.draw();
    });
  }

  draw() {
    const top = this.element.scrollTop;
    const first = Math.max(0, Math.floor(top / this.rowHeight) - SPARE_ROWS);
    const last = Math.min(
      this.items.length,
      Math.ceil((top + this.element.clientHeight) / this.rowHeight) + SPARE_ROWS,
    );
    const count = Math.max(0, last - first);
    while (this.rows.length < count) {
      const row = this.make();
      row.setAttribute("role", "option");
      this.rows.push(row);
      this.space.append(row);
    }
    // a place always uses the same element, so that scrolling by a row fills one element and not all
    const pool = this.rows.length;
    const used = new Set();
    for (let place = first; place < last; place += 1) {
      const row = this.rows[place % pool];
      used.add(row);
      row.hidden = false;
      if (row.vfPlace !== place) {
        row.vfPlace = place;
        row.style.transform = `translateY(${place * this.rowHeight}px)`;
        row.id = `${this.element.getAttribute("aria-label").toLowerCase()}-${place}`;
        row.setAttribute("aria-posinset", place + 1);
        row.setAttribute("aria-setsize", this.items.length);
        this.fill(row, this.items[place]);
      }
      row.setAttribute("aria-selected", place === this.active);
    }
    for (const row of this.rows) if (!used.has(row)) row.hidden = true;
    const current = this.rows.find((row) => !row.hidden && row.vfPlace === this.active);
    if (current) this.element.setAttribute("aria-activedescendant", current.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  /** Makes a place the active one and brings it into view; returns its item. */
  activate(place) {
    if (!this.items.length) return null;
    this.active = Math.max(0, Math.min(this.items.length - 1, place));
    const top = this.active * this.rowHeight;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + this.rowHeight > scrollTop + clientHeight)
      this.element.scrollTop = top + this.rowHeight - clientHeight;
    this.draw();
    return this.items[this.active];
  }

  move(by) {
    return this.activate(this.active < 0 ? 0 : this.active + by);
  }

  onKey(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.rowHeight) - 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      this.activate(Math.max(0, Math.min(this.items.length - 1, Math.max(this.active, 0) + steps[event.key])));
    }
  }

  onClick(event) {
    const row = event.target.closest("[role=option]");
    if (!row) return;
    const item = this.activate(row.vfPlace);
    if (item) this.open(item);
  }
}
