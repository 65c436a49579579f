"use strict";
// The thought explorer: a filtered list, the chosen thought in its text, a slider over the moments of training.

const ROW_HEIGHT = 68;

class Explorer {
  constructor(explorers, place = null) {
    this.explorers = explorers;
    this.filled = new Map();
    this.state = { which: 0, filter: "content", source: "", kind: "", search: "", snapshot: -1, item: -1 };
    if (place) Object.assign(this.state, this.stateOf(place));
    this.list = new VirtualList({
      label: "Thoughts",
      id: "thought-list",
      rowHeight: ROW_HEIGHT,
      draw: (row, index) => this.drawRow(row, index),
      choose: (index) => this.choose(this.found[index]),
      open: () => this.focusPlace(),
    });
    this.controls = el("div", { class: "controls" });
    this.count = el("p", { class: "count", role: "status" });
    this.none = el("p", { class: "absent", hidden: true }, "No thought passes these filters.");
    this.view = el("div", { class: "view" });
    this.slide = el("div", { class: "slide" });
    this.where = el("div", { class: "where" });
    this.root = section(
      "thoughts",
      "Thoughts",
      this.introduction(),
      this.controls,
      this.slide,
      el("div", { class: "explorer" }, el("div", { class: "side" }, this.count, this.list.box, this.none), this.view),
      this.where,
    );
    this.open();
  }

  get thoughts() {
    const { which } = this.state;
    if (!this.filled.has(which)) this.filled.set(which, new Thoughts(this.explorers[which]));
    return this.filled.get(which);
  }

  introduction() {
    const scale = ["harm-4", "harm-2", "even", "help-2", "help-4"].map((step) =>
      el("span", { class: `swatch ${step}` }),
    );
    return el(
      "div",
      { class: "intro" },
      el(
        "p",
        {},
        "Places in real texts where the model was asked to think. ",
        "What it wrote is hidden from the reader of the text; here it is shown. Colour is ",
        term("content_gain", "content gain"),
        ": how much better the following text is predicted with the model’s own thought than with another text’s.",
      ),
      el("p", { class: "key" }, el("span", {}, "own thought worse"), scale, el("span", {}, "own thought better")),
    );
  }

  open() {
    const { explorer } = this.thoughts;
    const last = explorer.windows.length - 1;
    if (this.state.snapshot < 0 || this.state.snapshot > last) this.state.snapshot = last;
    this.drawControls();
    this.drawSlider();
    this.refresh();
    this.drawWhere();
  }

  drawControls() {
    const { explorer } = this.thoughts;
    const usable = Object.entries(FILTERS).filter(
      ([, rule]) => !rule.turn || explorer.snapshots.some((snapshot) => snapshot[rule.by]),
    );
    if (!usable.some(([id]) => id === this.state.filter)) this.state.filter = usable[0][0];
    const search = el("input", {
      type: "search",
      id: "thought-search",
      placeholder: "in thoughts and texts",
      value: this.state.search,
      autocomplete: "off",
      onfocus: () => this.thoughts.haystack(this.state.snapshot),
      oninput: () => this.set({ search: search.value }),
    });
    search.value = this.state.search;
    const named = (names) => [{ id: "", title: "all" }, ...names.map((title, id) => ({ id: String(id), title }))];
    fill(
      this.controls,
      this.explorers.length > 1 &&
        picker(
          "Model",
          this.explorers.map((one, id) => ({ id: String(id), title: `${one.label}, seed ${one.seed}` })),
          String(this.state.which),
          (id) => {
            Object.assign(this.state, { which: Number(id), item: -1, source: "", kind: "", snapshot: -1 });
            this.open();
          },
        ),
      chooser(
        "Show",
        "thought-filter",
        usable.map(([id, rule]) => ({ id, title: rule.title })),
        this.state.filter,
        (filter) => this.set({ filter }),
      ),
      el(
        "div",
        { class: "fields" },
        el("label", { class: "field grow" }, el("span", {}, "Search"), search),
        explorer.sources.length > 1 &&
          picker("Source", named(explorer.sources), this.state.source, (source) => this.set({ source })),
        explorer.kinds.length > 1 &&
          picker("Kind of place", named(explorer.kinds), this.state.kind, (kind) => this.set({ kind })),
      ),
    );
  }

  drawSlider() {
    const { windows, names } = this.thoughts.explorer;
    if (windows.length < 2) {
      fill(
        this.slide,
        el(
          "p",
          { class: "absent" },
          `Measured once, at window ${windows[0] ?? 0}: there is no earlier moment to compare with.`,
        ),
      );
      return;
    }
    const spoken = () => `${names[this.state.snapshot]}, window ${windows[this.state.snapshot]}`;
    const shown = el("output", {}, spoken());
    const range = el("input", {
      type: "range",
      min: 0,
      max: windows.length - 1,
      step: 1,
      "aria-valuetext": spoken(),
      id: "window-slider",
    });
    range.value = String(this.state.snapshot);
    range.addEventListener("input", () => this.set({ snapshot: Number(range.value) }));
    this.slider = { range, shown, spoken };
    fill(this.slide, el("label", { class: "slider" }, el("span", {}, "Moment in training"), range), shown);
  }

  // Filters choose what is listed; the slider keeps the place, also where the filter would leave it out at that moment.
  set(change) {
    Object.assign(this.state, change);
    const moved = "snapshot" in change;
    if (this.slider) {
      this.slider.range.value = String(this.state.snapshot);
      this.slider.range.setAttribute("aria-valuetext", this.slider.spoken());
      this.slider.shown.textContent = this.slider.spoken();
    }
    this.refresh(moved);
    if (moved) this.drawWhere();
  }

  refresh(keepItem = false) {
    this.found = this.thoughts.find(this.state);
    const place = this.found.indexOf(this.state.item);
    if (place < 0 && !(keepItem && this.state.item >= 0)) this.state.item = this.found[0] ?? -1;
    const leftOut = this.thoughts.explorer.left_out ?? 0;
    const rest = leftOut ? `; ${plain(leftOut)} more left out to keep the page small` : "";
    this.count.textContent = `${plain(this.found.length)} of ${count(this.thoughts.size, "thought")}${rest}`;
    this.list.box.hidden = this.found.length === 0;
    this.none.hidden = this.found.length > 0;
    if (place < 0) this.list.box.scrollTop = 0;
    this.scale = this.thoughts.scale(this.state.snapshot);
    this.list.show(this.found.length, this.found.indexOf(this.state.item));
    this.drawView();
  }

  drawRow(row, index) {
    const item = this.found[index];
    const { snapshot } = this.state;
    const gain = this.thoughts.measure(item, snapshot, "content_gain");
    const [before, after] = this.thoughts.around(item, 8, 6);
    put(row, [
      el("span", { class: `gain ${gainClass(gain, this.scale)}` }, signed(gain, 2)),
      el(
        "span",
        { class: "what" },
        el(
          "bdi",
          { class: "thought" },
          this.thoughts.thought(item, snapshot).join("").replace(/\s+/g, " ").slice(0, 160) || "(empty)",
        ),
        el("bdi", { class: "context" }, `${before.slice(-60)}\u25c6${after.slice(0, 60)}`.replace(/\s+/g, " ")),
      ),
    ]);
  }

  choose(item) {
    this.state.item = item;
    const index = this.found.indexOf(item);
    if (index !== this.list.chosen) this.list.show(this.found.length, index);
    this.drawView();
    history.replaceState(null, "", this.address());
  }

  // A place of the text was chosen in the reader: it may be one that the filters leave out of the list.
  choosePlace(item) {
    this.choose(item);
    this.focusPlace();
  }

  focusPlace() {
    this.view.querySelector('.place[aria-pressed="true"]')?.focus();
  }

  address() {
    const { explorer } = this.thoughts;
    const { item, snapshot } = this.state;
    const name = `${encodeURIComponent(explorer.label)}:${explorer.seed}:${explorer.items.id[item]}`;
    return `#item=${name}:w${explorer.windows[snapshot]}`;
  }

  // Which explorer and which of its items a link means; item −1 where there is none.
  find(label, seed, id) {
    const named = (one) => one.label === label || encodeURIComponent(one.label) === label;
    const which = this.explorers.findIndex((one) => named(one) && String(one.seed) === String(seed));
    return { which, item: which < 0 ? -1 : this.explorers[which].items.id.indexOf(Number(id)) };
  }

  // Follows #item=LABEL:SEED:ID[:wWINDOW]; false where there is no such item.
  follow(hash) {
    const found = /^#item=([^:]*):(-?\d+):(-?\d+)(?::w(\d+))?$/.exec(hash);
    const { which, item } = found ? this.find(found[1], found[2], found[3]) : { item: -1 };
    if (item < 0) return false;
    const snapshot = this.explorers[which].windows.indexOf(Number(found[4]));
    Object.assign(this.state, { which, item, snapshot, filter: "text", source: "", kind: "", search: "" });
    this.open();
    this.root.scrollIntoView();
    return true;
  }

  // What a page that is drawn anew must know to show the same place: filters, item and moment, by their names.
  place() {
    const { explorer } = this.thoughts;
    const { filter, source, kind, search, snapshot, item } = this.state;
    const latest = snapshot === explorer.windows.length - 1;
    const kept = { label: explorer.label, seed: explorer.seed, id: explorer.items.id[item] };
    return { ...kept, filter, source, kind, search, window: latest ? null : explorer.windows[snapshot] };
  }

  // Takes such a place up; what is no longer there gives way to the first of its kind.
  stateOf({ label, seed, id, window, ...filters }) {
    const { which, item } = this.find(label, seed, id);
    const windows = this.explorers[Math.max(0, which)].windows;
    return { ...filters, which: Math.max(0, which), item, snapshot: window === null ? -1 : windows.indexOf(window) };
  }

  drawView() {
    const { item, snapshot } = this.state;
    if (item < 0) {
      fill(this.view, el("p", { class: "absent" }, "Choose a thought from the list."));
      return;
    }
    const { thoughts } = this;
    const source = [thoughts.source(item), thoughts.kind(item) && `${thoughts.kind(item)} position`]
      .filter(Boolean)
      .join(" · ");
    const top = this.view.querySelector(".reader")?.scrollTop ?? 0;
    fill(
      this.view,
      el(
        "div",
        { class: "title" },
        el("h3", {}, "In its text"),
        el("span", { class: "aside" }, source),
        el("a", { class: "link", href: this.address() }, "Link to this thought"),
      ),
      readerOf(thoughts, item, snapshot, (other) => this.choosePlace(other)),
      figuresOf(thoughts, item, snapshot),
      historyOf(thoughts, item, snapshot, (other) => {
        this.set({ snapshot: other });
        this.view.querySelector('.history [aria-pressed="true"]')?.focus();
      }),
      el("div", { class: "tables" }, tokenTable(thoughts, item, snapshot), lossTable(thoughts, item, snapshot)),
    );
    const reader = this.view.querySelector(".reader");
    const place = reader.querySelector('[aria-pressed="true"]');
    reader.scrollTop = top;
    if (place && (place.offsetTop < reader.scrollTop || place.offsetTop > reader.scrollTop + reader.clientHeight - 60))
      reader.scrollTop = place.offsetTop - 80;
    if (document.documentElement.dataset.ready)
      announce(`Content gain ${signed(thoughts.measure(item, snapshot, "content_gain"))}`);
  }

  drawWhere() {
    const { thoughts } = this;
    const { sources, kinds, snapshots } = thoughts.explorer;
    this.where.hidden = !snapshots[this.state.snapshot].content_gain || !(sources.length || kinds.length);
    if (this.where.hidden) return;
    const rows = (nameOf) =>
      thoughts
        .groups(this.state.snapshot, nameOf)
        .map((group) => [
          group.name || "unnamed",
          plain(group.items),
          signed(group.content_gain / group.items),
          signed(group.thought_gain / group.items),
          percent(group.harmed / group.items),
        ]);
    const head = (name) => [name, "thoughts", term("content_gain"), term("thought_gain"), "share harmed"];
    fill(
      this.where,
      el("h3", {}, "Where thoughts help and harm (development texts)"),
      el(
        "div",
        { class: "pair" },
        sources.length > 0 &&
          table(
            head("source"),
            rows((item) => thoughts.source(item)),
            { label: "By source" },
          ),
        kinds.length > 0 &&
          table(
            head("kind of place"),
            rows((item) => thoughts.kind(item)),
            { label: "By kind of place" },
          ),
      ),
    );
  }
}
