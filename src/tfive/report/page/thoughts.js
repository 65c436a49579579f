"use strict";
// The thoughts a run kept, read from the data's columns (texts, items, snapshots), and which of them a filter leaves.

function runningSums(lengths) {
  const starts = new Uint32Array(lengths.length + 1);
  for (let index = 0; index < lengths.length; index++) starts[index + 1] = starts[index] + lengths[index];
  return starts;
}

class Thoughts {
  constructor(explorer) {
    this.explorer = explorer;
    this.size = explorer.items.id.length;
    this.starts = explorer.snapshots.map((snapshot) => runningSums(snapshot.length));
    this.haystacks = [];
    this.texts = new Map();
    this.detailed = this.detailStarts();
    for (let item = 0; item < this.size; item++) {
      const text = explorer.items.text[item];
      if (!this.texts.has(text)) this.texts.set(text, []);
      this.texts.get(text).push(item);
    }
    for (const items of this.texts.values())
      items.sort((a, b) => explorer.items.position[a] - explorer.items.position[b]);
  }

  // Where each detailed item's rows begin, for its thought's tokens and for the tokens that follow it.
  detailStarts() {
    const rows = [];
    this.explorer.items.detail.forEach((row, item) => {
      if (row >= 0) rows[row] = item;
    });
    return this.explorer.snapshots.map((snapshot) => ({
      actions: runningSums(rows.map((item) => snapshot.length[item])),
      following: snapshot.detail ? runningSums(snapshot.detail.horizon) : null,
    }));
  }

  get quantum() {
    return this.explorer.quantities;
  }
  piece(index) {
    return this.explorer.pieces[index] ?? "";
  }

  measure(item, snapshot, name) {
    const column = this.explorer.snapshots[snapshot][name];
    const value = column?.[item];
    return isNumber(value) ? value * (name === "gate" ? this.quantum.weight : this.quantum.gain) : null;
  }

  thought(item, snapshot) {
    const starts = this.starts[snapshot];
    return this.explorer.snapshots[snapshot].tokens
      .slice(starts[item], starts[item + 1])
      .map((token) => this.piece(token));
  }

  tokens(text) {
    const { offsets, tokens } = this.explorer.texts;
    return tokens.slice(offsets[text], offsets[text + 1]).map((token) => this.piece(token));
  }

  // The document each token of a text belongs to; runs of [document, tokens] in the data.
  documents(text) {
    const runs = this.explorer.texts.documents?.[text] ?? [];
    const found = [];
    for (let at = 0; at < runs.length; at += 2) for (let token = 0; token < runs[at + 1]; token++) found.push(runs[at]);
    return found;
  }

  // The text around an item, `before` tokens up to its position and `after` tokens behind it.
  around(item, before, after) {
    const { offsets, tokens } = this.explorer.texts;
    const text = this.explorer.items.text[item];
    const here = offsets[text] + this.explorer.items.position[item] + 1;
    const part = (from, to) => {
      let joined = "";
      for (let token = Math.max(from, offsets[text]); token < Math.min(to, offsets[text + 1]); token++)
        joined += this.piece(tokens[token]);
      return joined;
    };
    return [part(here - before, here), part(here, here + after)];
  }

  // −1 where nobody knows, as in runs of the old format.
  source(item) {
    return this.explorer.sources[this.explorer.items.source[item]] ?? "";
  }

  kind(item) {
    return this.explorer.kinds[this.explorer.items.kind[item]] ?? "";
  }

  // Token-level detail of one item at one snapshot, or null where the page's budget left it out.
  detail(item, snapshot) {
    const row = this.explorer.items.detail[item];
    const kept = this.explorer.snapshots[snapshot].detail;
    if (row < 0 || !kept) return null;
    const { actions, following } = this.detailed[snapshot];
    const cut = (column, starts, unit) =>
      column
        ? column.slice(starts[row], starts[row + 1]).map((value) => (isNumber(value) ? value * unit : null))
        : null;
    const { loss, value, weight } = this.quantum;
    return {
      losses: Object.fromEntries(
        ["without", "own", "other", "empty"].map((name) => [name, cut(kept[name], following, loss)]),
      ),
      gate: cut(kept.gate, following, weight),
      values: kept.values?.map((column) => cut(column, actions, value)) ?? null,
      advantages: kept.advantages?.map((column) => cut(column, actions, value)) ?? null,
      weight: cut(kept.weight, actions, weight),
      mixed: cut(kept.mixed, actions, value),
      returns: cut(kept.returns, actions, value),
    };
  }

  whyBare(item, snapshot) {
    if (this.explorer.snapshots.every((one) => !one.detail)) return "This run kept no token-level numbers.";
    return this.detail(item, snapshot)
      ? "No critic had values for it at this moment."
      : "Token-level detail of this item was left out to keep the page small.";
  }

  // What the search looks through: the thought, and the text it stands in, near its place.
  haystack(snapshot) {
    this.surroundings ??= Array.from({ length: this.size }, (_, item) =>
      this.around(item, 16, 16).join("").toLowerCase(),
    );
    const { tokens } = this.explorer.snapshots[snapshot];
    const starts = this.starts[snapshot];
    this.haystacks[snapshot] ??= Array.from({ length: this.size }, (_, item) => {
      let thought = "";
      for (let token = starts[item]; token < starts[item + 1]; token++) thought += this.explorer.pieces[tokens[token]];
      return thought.toLowerCase();
    });
    return this.haystacks[snapshot];
  }

  // Items that pass, best first by the filter's own measure.
  find({ filter, source, kind, search, snapshot }) {
    const rule = FILTERS[filter];
    const column = this.explorer.snapshots[snapshot][rule.by];
    const sought = search.trim().toLowerCase();
    const haystack = sought ? this.haystack(snapshot) : null;
    const found = [];
    for (let item = 0; item < this.size; item++) {
      if (source !== "" && this.explorer.items.source[item] !== Number(source)) continue;
      if (kind !== "" && this.explorer.items.kind[item] !== Number(kind)) continue;
      if (rule.keep && !rule.keep(this.measure(item, snapshot, rule.by))) continue;
      if (haystack && !haystack[item].includes(sought) && !this.surroundings[item].includes(sought)) continue;
      found.push(item);
    }
    if (column && rule.turn)
      found.sort((a, b) => rule.turn * ((column[b] ?? -Infinity) - (column[a] ?? -Infinity)) || a - b);
    return found;
  }

  // Means by source or by kind of position: where thoughts help.
  groups(snapshot, nameOf) {
    const groups = new Map();
    for (let item = 0; item < this.size; item++) {
      const name = nameOf(item);
      if (!groups.has(name)) groups.set(name, { name, items: 0, thought_gain: 0, content_gain: 0, harmed: 0 });
      const group = groups.get(name);
      group.items += 1;
      const gain = this.measure(item, snapshot, "thought_gain");
      group.thought_gain += gain ?? 0;
      group.content_gain += this.measure(item, snapshot, "content_gain") ?? 0;
      group.harmed += isNumber(gain) && gain < 0 ? 1 : 0;
    }
    return [...groups.values()].sort((a, b) => b.content_gain / b.items - a.content_gain / a.items);
  }

  // A content gain that only one item in twenty exceeds: the end of the colour scale.
  scale(snapshot) {
    const sizes = Float64Array.from(this.explorer.snapshots[snapshot].content_gain ?? [], (value) =>
      Math.abs(value ?? 0),
    ).sort();
    return (sizes[Math.floor(sizes.length * 0.95)] ?? 0) * this.quantum.gain || this.quantum.gain;
  }
}

const FILTERS = {
  content: { title: "Largest content gain", by: "content_gain", turn: 1 },
  gain: { title: "Largest gain", by: "thought_gain", turn: 1 },
  harm: { title: "Largest harm", by: "thought_gain", turn: -1, keep: (value) => value < 0 },
  worse: { title: "Own worse than another’s", by: "content_gain", turn: -1, keep: (value) => value < 0 },
  open: { title: "Gate open", by: "gate", turn: 1, keep: (value) => value >= 0.5 },
  text: { title: "In text order", by: "content_gain", turn: 0 },
};

// Nine steps from harm to gain; the sign is in the class, so that a pattern can say what a colour says.
function gainClass(value, scale) {
  if (!isNumber(value)) return "unknown";
  const level = Math.min(4, Math.round((4 * Math.abs(value)) / scale));
  return level === 0 ? "even" : `${value > 0 ? "help" : "harm"}-${level}`;
}
