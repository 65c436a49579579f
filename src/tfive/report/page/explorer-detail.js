"use strict";
// One thought: the text it stands in, its tokens with the critics' numbers, and the loss of every token behind it.

// The whole text with every place at which a thought was measured; other documents of the same sequence stand back, and
// the tokens behind the chosen place show what its thought changed.
function readerOf(thoughts, item, snapshot, choose) {
  const { explorer } = thoughts;
  const text = explorer.items.text[item];
  const tokens = thoughts.tokens(text);
  const scale = thoughts.scale(snapshot);
  const places = new Map(thoughts.texts.get(text).map((other) => [explorer.items.position[other], other]));
  const detail = thoughts.detail(item, snapshot);
  const here = explorer.items.position[item];
  const documents = thoughts.documents(text);
  const parts = [];
  let run = "";
  let elsewhere = false;
  const flush = () => {
    if (run) parts.push(elsewhere ? el("span", { class: "elsewhere" }, run) : run);
    run = "";
  };
  tokens.forEach((token, at) => {
    if ((documents[at] !== documents[here]) !== elsewhere) {
      flush();
      elsewhere = !elsewhere;
    }
    const place = places.get(at);
    const saved =
      detail && at > here && at <= here + detail.losses.own.length
        ? detail.losses.without[at - here - 1] - detail.losses.own[at - here - 1]
        : null;
    if (place !== undefined) {
      flush();
      parts.push(placeButton(thoughts, place, snapshot, token, scale, place === item, choose));
    } else if (saved !== null) {
      flush();
      parts.push(
        el("span", { class: `after ${gainClass(saved, 2)}`, title: `${signed(saved, 2)} nats saved here` }, token),
      );
    } else run += token;
    if (at === here) {
      flush();
      parts.push(
        el(
          "span",
          { class: "inserted" },
          el("span", { class: "unseen" }, " thought: "),
          el("bdi", {}, oneLine(thoughts.thought(item, snapshot).join("")) || "(empty)"),
          el("span", { class: "unseen" }, " end of thought. "),
        ),
      );
    }
  });
  flush();
  const box = el(
    "div",
    {
      class: "reader",
      dir: "auto",
      role: "group",
      "aria-label": "Text with its thoughts; arrow keys go from place to place",
    },
    parts,
  );
  box.addEventListener("keydown", (event) => stepPlaces(event, box));
  return box;
}

function placeButton(thoughts, item, snapshot, token, scale, chosen, choose) {
  const gain = thoughts.measure(item, snapshot, "content_gain");
  const said = isNumber(gain) ? `content gain ${signed(gain)}` : "content gain not kept";
  return el(
    "button",
    {
      type: "button",
      class: `place ${gainClass(gain, scale)}`,
      tabindex: chosen ? 0 : -1,
      "aria-pressed": chosen ? "true" : "false",
      "data-item": item,
      "aria-label": `thought after “${readable(token).trim() || "space"}”, ${said}`,
      onclick: () => choose(item),
    },
    token.trim() === "" ? `${token}\u25c6` : token,
  );
}

function stepPlaces(event, box) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const places = [...box.querySelectorAll(".place")];
  const next = places[places.indexOf(document.activeElement) + step];
  if (!next) return;
  for (const place of places) place.tabIndex = place === next ? 0 : -1;
  next.focus();
}

const FIGURES = ["content_gain", "thought_gain", "other_gain", "empty_gain", "gain_vs_base", "mixed_gain"];

function figuresOf(thoughts, item, snapshot) {
  const gate = thoughts.measure(item, snapshot, "gate");
  const gateLines = [
    "The prediction gate mixes the two predictions: 0 takes the one without the thought, 1 the one with it.",
  ];
  if (gate === null && !FIGURES.some((name) => thoughts.explorer.snapshots[snapshot][name])) return null;
  return el(
    "dl",
    { class: "figures" },
    FIGURES.filter((name) => thoughts.explorer.snapshots[snapshot][name]).map((name) => {
      const value = thoughts.measure(item, snapshot, name);
      return el("div", {}, el("dt", {}, term(name)), el("dd", { class: value < 0 ? "minus" : "plus" }, signed(value)));
    }),
    gate !== null &&
      el(
        "div",
        {},
        el("dt", {}, explained("gate", gateLines)),
        el("dd", {}, el("meter", { min: 0, max: 1, value: gate, "aria-label": "gate" }), ` ${fixed(gate)}`),
      ),
  );
}

// The same place at every snapshot, side by side.
function historyOf(thoughts, item, chosen, choose) {
  const { windows, names } = thoughts.explorer;
  if (windows.length < 2) return null;
  return el(
    "ol",
    { class: "history", "aria-label": "The same place over training" },
    windows.map((window, snapshot) => {
      const gain = thoughts.measure(item, snapshot, "content_gain");
      return el(
        "li",
        {},
        el(
          "button",
          { type: "button", "aria-pressed": snapshot === chosen ? "true" : "false", onclick: () => choose(snapshot) },
          el("span", { class: "when" }, `${names[snapshot]} · window ${window}`),
          el("bdi", { class: "thought" }, oneLine(thoughts.thought(item, snapshot).join("")) || "(empty)"),
          isNumber(gain) && el("span", { class: "figure" }, `content gain ${signed(gain)}`),
        ),
      );
    }),
  );
}

function tokenTable(thoughts, item, snapshot) {
  const detail = thoughts.detail(item, snapshot);
  const tokens = thoughts.thought(item, snapshot);
  const ended = thoughts.explorer.snapshots[snapshot].closed[item];
  const columns = [];
  const add = (values, form, title, lines) => {
    if (values) columns.push({ values, form, head: explained(title, lines) });
  };
  detail?.values?.forEach((values, critic) =>
    add(values, (value) => fixed(value), `V${critic + 1}`, [
      `Critic ${critic + 1}: the return it expects before this token is written.`,
    ]),
  );
  add(detail?.returns, (value) => fixed(value), "return", [
    "What followed from here, in the reward’s own scale: what the critics try to predict.",
  ]);
  detail?.advantages?.forEach((values, critic) =>
    add(values, (value) => signed(value, 2), `Ã${critic + 1}`, [
      `Normalised advantage of this token by critic ${critic + 1}: above 0, it did better than expected.`,
    ]),
  );
  add(detail?.weight, (value) => fixed(value), "weight", [
    "The calibrated weight w of critic 1 in the mixture; critic 2 has 1 − w.",
  ]);
  add(detail?.mixed, (value) => signed(value, 2), "mixed", [
    "The advantage the policy is trained with: w Ã1 + (1 − w) Ã2.",
  ]);
  const rows = tokens.map((token, index) => [
    el("bdi", { class: "token" }, readable(token)),
    ...columns.map(({ values, form }) => shaded(values[index], form)),
  ]);
  return el(
    "div",
    {},
    el("h4", {}, "The thought, token by token"),
    table(["token", ...columns.map((column) => column.head)], rows, {
      label: "The thought, token by token",
      class: "compact",
    }),
    !columns.length && el("p", { class: "absent" }, thoughts.whyBare(item, snapshot)),
    el(
      "p",
      { class: "aside" },
      ended ? "The model closed the thought itself." : "The thought ended at its full length.",
    ),
  );
}

function shaded(value, form) {
  const sign = form(0.5).startsWith("+");
  return el(
    "span",
    { class: sign && isNumber(value) ? (value < 0 ? "minus" : "plus") : "" },
    isNumber(value) ? form(value) : DASH,
  );
}

function lossTable(thoughts, item, snapshot) {
  const detail = thoughts.detail(item, snapshot);
  if (!detail) return null;
  const { explorer } = thoughts;
  const tokens = thoughts.tokens(explorer.items.text[item]);
  const here = explorer.items.position[item];
  const { without, own, other, empty } = detail.losses;
  const widest = Math.max(0.5, ...without.map((value, index) => Math.abs(value - own[index])));
  const head = [
    "token",
    explained("saved", [
      "Loss without a thought − loss with its own, of this token: to the right the thought helped, to the left it harmed.",
    ]),
    "without",
    "with own",
    "another’s",
    "empty",
  ];
  if (detail.gate) head.push("gate");
  const rows = without.map((value, index) => {
    const cells = [value, own[index], other?.[index], empty?.[index]].map((loss) => fixed(loss));
    const row = [
      el("bdi", { class: "token" }, readable(tokens[here + 1 + index] ?? "")),
      savedBar(value - own[index], widest),
      ...cells,
    ];
    if (detail.gate) row.push(fixed(detail.gate[index]));
    return row;
  });
  return el(
    "div",
    {},
    el("h4", {}, "The text behind it: loss of each token, in nats"),
    table(head, rows, { label: "Loss of each following token", class: "compact losses" }),
  );
}

function savedBar(saved, widest) {
  const bar = el("span", { class: `bar ${saved < 0 ? "minus" : "plus"}`, "aria-hidden": "true" });
  bar.style.width = `${(34 * Math.abs(saved)) / widest}px`;
  return el(
    "span",
    { class: "saved" },
    el("span", { class: "track" }, bar),
    el("span", { class: "figure" }, signed(saved, 2)),
  );
}
