"use strict";
// A list of any length of which only the rows in sight exist: a listbox whose options know their place and number.

class VirtualList {
  // draw(row element, index) fills a row; choose(index) is told what was chosen.
  constructor({ label, id, rowHeight, draw, choose, open }) {
    Object.assign(this, { rowHeight, draw, choose, open, size: 0, chosen: -1, rows: new Map() });
    this.name = id;
    this.inner = el("div", { class: "rows", role: "presentation" });
    this.box = el(
      "div",
      {
        id,
        class: "virtual",
        tabindex: 0,
        role: "listbox",
        "aria-label": label,
        onscroll: () => this.paint(),
        onkeydown: (event) => this.key(event),
      },
      this.inner,
    );
    new ResizeObserver(() => this.paint()).observe(this.box);
  }

  show(size, chosen) {
    this.size = size;
    this.chosen = chosen;
    this.inner.style.height = `${size * this.rowHeight}px`;
    this.box.style.maxHeight = `${size * this.rowHeight + 2}px`;
    this.inner.replaceChildren();
    this.rows.clear();
    if (chosen >= 0) this.reveal(chosen);
    this.paint();
  }

  paint() {
    const height = this.box.clientHeight || 480;
    const first = Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight) - 4);
    const last = Math.min(this.size, Math.ceil((this.box.scrollTop + height) / this.rowHeight) + 4);
    for (const [index, row] of this.rows) {
      if ((index < first || index >= last) && index !== this.chosen) {
        row.remove();
        this.rows.delete(index);
      }
    }
    for (let index = first; index < last; index++) this.row(index);
    if (this.chosen >= 0 && this.chosen < this.size) this.row(this.chosen);
    this.point();
  }

  row(index) {
    if (this.rows.has(index)) return;
    const row = el("div", {
      id: `${this.name}-${index}`,
      class: "row",
      role: "option",
      "aria-setsize": this.size,
      "aria-posinset": index + 1,
      "aria-selected": index === this.chosen ? "true" : "false",
      onclick: () => this.pick(index),
    });
    row.style.top = `${index * this.rowHeight}px`;
    row.style.height = `${this.rowHeight}px`;
    this.draw(row, index);
    this.rows.set(index, row);
    this.inner.append(row);
  }

  point() {
    if (this.chosen >= 0 && this.chosen < this.size)
      this.box.setAttribute("aria-activedescendant", `${this.name}-${this.chosen}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  reveal(index) {
    const top = index * this.rowHeight;
    const height = this.box.clientHeight || 480;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + this.rowHeight > this.box.scrollTop + height) this.box.scrollTop = top + this.rowHeight - height;
  }

  pick(index) {
    if (index < 0 || index >= this.size) return;
    this.rows.get(this.chosen)?.setAttribute("aria-selected", "false");
    this.chosen = index;
    this.reveal(index);
    this.paint();
    this.rows.get(index)?.setAttribute("aria-selected", "true");
    this.choose(index);
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.rowHeight) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -this.size, End: this.size };
    if (event.key in moves) {
      event.preventDefault();
      this.pick(clamp(this.chosen + moves[event.key], 0, this.size - 1));
    } else if (event.key === "Enter" && this.chosen >= 0) {
      event.preventDefault();
      this.open?.();
    }
  }
}
