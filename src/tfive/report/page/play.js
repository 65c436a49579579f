"use strict";
// A text is typed, the server says where the model thinks, what it thinks and what it expects next.

const WAYS = [
  { id: "every", title: "regularly" },
  { id: "end", title: "at the end" },
  { id: "unsure", title: "where it is unsure" },
  { id: "gate", title: "where the gate trusts it" },
  { id: "chosen", title: "where I choose" },
];
const FULL_GAIN = 2;
const STEPS = 5;

const play = {
  model: null,
  asked: { text: "", places: "every", positions: [], seed: 0 },
  found: null,
  selected: null,
  thinking: true,
  busy: false,
  parts: {},
};

function readModel() {
  const packed = atob(document.getElementById("tfive-data").textContent.trim());
  return JSON.parse(packed);
}

async function ask(what, question) {
  const answer = await fetch(what, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(question),
  });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

// One request at a time: the model answers one, and so the buttons rest meanwhile.
async function during(work) {
  if (play.busy) return;
  play.busy = true;
  document.documentElement.dataset.busy = "";
  announce("The model is thinking.");
  fill(play.parts.problem);
  try {
    await work();
  } catch (error) {
    const said = error instanceof TypeError ? "The server does not answer; is tfive play still running?" : error.message;
    fill(play.parts.problem, el("p", { class: "problem", role: "alert" }, said));
  } finally {
    play.busy = false;
    delete document.documentElement.dataset.busy;
  }
}

function think(changes = {}) {
  return during(async () => {
    const text = play.parts.text.value;
    const same = play.found !== null && text === play.asked.text;
    const kept = same ? play.asked.positions : [];
    const question = { ...play.asked, positions: kept, ...changes, text };
    if (question.places === "chosen" && !same) question.places = "every";
    if (question.places !== "chosen") question.positions = [];
    const found = await ask("look", question);
    const place = same && play.selected !== null ? play.selected : found.tokens.length - 1;
    play.asked = { ...question, positions: found.places };
    play.found = found;
    play.selected = Math.min(place, found.tokens.length - 1);
    fill(play.parts.written);
    show();
    announce(sentence());
  });
}

function goOn() {
  return during(async () => {
    const text = play.parts.text.value;
    const found = await ask("go-on", { text, seed: play.asked.seed });
    fill(
      play.parts.written,
      el("h2", {}, "How it goes on"),
      el(
        "dl",
        { class: "written" },
        el("dt", {}, "without thoughts"),
        el("dd", {}, el("bdi", {}, text), el("strong", {}, found.without)),
        el("dt", {}, "with thoughts, shown between \u27e8 and \u27e9"),
        el("dd", {}, el("bdi", {}, text), el("strong", {}, found.with)),
      ),
    );
    announce("The model has gone on.");
  });
}

function again() {
  return think({ seed: play.asked.seed + 1 });
}

function toggle(place) {
  const chosen = new Set(play.found.places);
  if (!chosen.delete(place)) chosen.add(place);
  play.selected = place;
  return think({ places: "chosen", positions: [...chosen].sort((a, b) => a - b) });
}

function sentence() {
  const { thoughts, served, tokens, mean_gain: gain } = play.found;
  if (!thoughts.length) return "The model does not think here.";
  const told = `${count(thoughts.length, "thought")}, serving ${served} of ${count(tokens.length - 1, "token")}`;
  if (!isNumber(gain) || !served) return `${told} of this text, and what comes after it.`;
  const worth = gain >= 0 ? "better" : "worse";
  return `${told}: the text is predicted ${fixed(Math.abs(gain), 3)} nats per token ${worth} than without thoughts.`;
}

function strength(place) {
  const known = place > 0 ? play.found.predictions[place - 1] : null;
  if (!play.thinking || !known?.served || !isNumber(known.mixed)) return "";
  const gain = known.mixed - known.plain;
  const step = Math.ceil(clamp(Math.abs(gain) / FULL_GAIN, 0, 1) * STEPS);
  return step ? ` ${gain > 0 ? "more" : "less"}-${step}` : "";
}

function show() {
  const { found, parts } = play;
  for (const way of document.querySelectorAll("input[name=places]")) way.checked = way.value === play.asked.places;
  const thoughts = new Map(found.thoughts.map((thought) => [thought.position, thought]));
  fill(parts.said, play.thinking ? sentence() : "Thoughts are off: these are its predictions without them.");
  fill(
    parts.tokens,
    found.tokens.map((token, place) => [
      el(
        "button",
        {
          type: "button",
          class: `piece${strength(place)}`,
          "aria-pressed": String(place === play.selected),
          "data-place": place,
          onclick: () => select(place),
        },
        el("bdi", {}, readable(token)),
      ),
      play.thinking &&
        thoughts.has(place) &&
        el("span", { class: "had" }, el("span", { class: "unseen" }, "thought: "), el("bdi", {}, thoughts.get(place).text)),
    ]),
  );
  detail(thoughts);
}

function select(place) {
  play.selected = place;
  show();
  play.parts.tokens.querySelector(`[data-place="${place}"]`)?.focus();
}

function detail(thoughts) {
  const { found, selected, parts } = play;
  const prediction = found.predictions[selected];
  const next = found.tokens[selected + 1];
  const thought = thoughts.get(selected);
  const serving = play.thinking && prediction.served;
  const source = serving ? found.thoughts.filter((one) => one.position <= selected).at(-1) : null;
  fill(
    parts.detail,
    el("h2", {}, "After \u201c", el("bdi", {}, oneLine(readable(found.tokens[selected]))), "\u201d"),
    source &&
      el(
        "p",
        { class: "thought-said" },
        source === thought ? "It thinks here: " : "Served by the thought before: ",
        el("q", {}, el("bdi", {}, source.text || "nothing")),
        source.closed ? " and closes the thought itself." : " until its length is used up.",
      ),
    serving && play.model.gate && el("p", {}, `The gate trusts this thought to ${percent(prediction.gate)}.`),
    next !== undefined && el("p", {}, followed(next, prediction, serving)),
    expected(prediction, serving),
    el(
      "p",
      {},
      el(
        "button",
        { type: "button", class: "act", onclick: () => toggle(selected) },
        thought ? "Do not think here" : "Think here",
      ),
    ),
  );
}

function followed(next, prediction, serving) {
  const chance = (value) => percentage(Math.exp(value));
  const plainly = ["The next token, \u201c", el("bdi", {}, readable(next)), "\u201d, gets ", chance(prediction.plain)];
  return serving ? [plainly, " without the thought and ", chance(prediction.mixed), " with it."] : [plainly, "."];
}

function percentage(value) {
  return value >= 0.0995 ? `${(100 * value).toFixed(0)} %` : value >= 0.001 ? `${(100 * value).toFixed(1)} %` : "< 0.1 %";
}

function bar(value) {
  return [el("meter", { min: 0, max: 1, value, "aria-hidden": "true" }), " ", percentage(value)];
}

function expected(prediction, serving) {
  const mixed = serving && play.model.gate;
  const head = ["token", "without a thought", serving && "with the thought", mixed && "as the gate mixes them"];
  const rows = prediction.top.map(([token, without, given, both]) => [
    el("bdi", {}, readable(token)),
    bar(without),
    serving && bar(given),
    mixed && bar(both),
  ]);
  const kept = (cells) => cells.filter((cell) => cell !== false && cell !== null);
  return table(kept(head), rows.map(kept), { label: "Likeliest next tokens" });
}

function build(model) {
  play.model = model;
  const { parts } = play;
  parts.text = el("textarea", {
    id: "text",
    rows: 4,
    maxlength: String(model.characters),
    spellcheck: "false",
    placeholder: "Type a text, or its beginning.",
    onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        think();
      }
    },
  });
  for (const name of ["problem", "said", "tokens", "detail", "written"]) parts[name] = el("div", { class: `play-${name}` });
  parts.tokens.setAttribute("role", "group");
  parts.tokens.setAttribute("aria-label", "The text, token by token, with its thoughts");
  const act = (label, work, name) => el("button", { type: "button", class: `act ${name}`, onclick: () => work() }, label);
  const ways = WAYS.filter((way) => way.id !== "gate" || model.gate);
  const off = el("input", {
    type: "checkbox",
    checked: true,
    onchange: () => {
      play.thinking = off.checked;
      if (play.found) show();
    },
  });
  fill(
    document.getElementById("main"),
    el(
      "section",
      { id: "play" },
      el("h1", {}, "What does it think?"),
      el("p", { class: "over" }, model.model),
      !model.trained &&
        el("p", { class: "problem" }, "Nobody has trained these thoughts: expect them to say nothing useful."),
      el("label", { class: "over", for: "text" }, "Text (Ctrl+Enter thinks)"),
      parts.text,
      el(
        "div",
        { class: "acts" },
        act("Think", () => think(), "first"),
        act("Again, differently", again, ""),
        act("Go on", goOn, ""),
        el("label", { class: "switch" }, off, " thoughts on"),
      ),
      chooser("Think", "places", ways, "every", (id) => {
        play.asked.places = id;
        think({ places: id });
      }),
      parts.problem,
      parts.said,
      parts.tokens,
      parts.detail,
      parts.written,
    ),
  );
  document.documentElement.dataset.ready = "";
}

build(readModel());
