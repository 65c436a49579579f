"use strict";
// The top of the page: what was trained, the verdict, and three numbers with their intervals and controls.

const STATES = { done: "finished", running: "running", stopped: "stopped", failed: "failed", unfinished: "unfinished" };
const TONES = {
  learned: "good",
  not_learned: "none",
  harmed: "bad",
  unclear: "none",
  unfinished: "none",
  no_thoughts: "none",
};

function storySection(data) {
  const { story } = data;
  const verdict = story?.verdict;
  return el(
    "section",
    { id: "story", "aria-labelledby": "story-title" },
    el("p", { class: "over" }, "tfive ", kindOf(data), " ", stateMark(data)),
    el("h1", { id: "story-title" }, data.title),
    factList(data.header ?? []),
    data.failure && el("p", { class: "failure" }, el("strong", {}, `${stateWord(data)}: `), data.failure),
    verdict &&
      el(
        "div",
        { class: `verdict ${TONES[verdict.code] ?? "none"}` },
        el("p", { class: "headline" }, verdict.headline),
        el("p", {}, coded(verdict.sentence ?? "")),
      ),
    story?.numbers?.length
      ? el("div", { class: "numbers" }, story.numbers.map(numberCard))
      : data.kind === "run" &&
          el("p", { class: "absent" }, "Nothing has been measured yet, so there are no numbers to judge."),
    story?.limits?.length > 0 &&
      el(
        "details",
        { class: "limits" },
        el("summary", {}, "What this does not show"),
        el(
          "ul",
          {},
          story.limits.map((line) => el("li", {}, coded(line))),
        ),
      ),
  );
}

function kindOf(data) {
  return { run: "run", study: "study", evaluation: "evaluation" }[data.kind] ?? "page";
}

function stateWord(data) {
  const word = STATES[data.state] ?? String(data.state);
  return word.charAt(0).toUpperCase() + word.slice(1);
}

function stateMark(data) {
  return data.state ? el("span", { class: `state ${data.state}` }, STATES[data.state] ?? String(data.state)) : null;
}

function factList(facts) {
  if (!facts.length) return null;
  return el(
    "dl",
    { class: "facts" },
    facts.map((fact) =>
      el("div", {}, el("dt", {}, fact.hint ? explained(fact.name, [fact.hint]) : fact.name), el("dd", {}, fact.value)),
    ),
  );
}

function numberCard(number) {
  const tone = number.good === true ? "good" : number.good === false ? "bad" : "none";
  const control = number.control;
  const form = signedLike(number.value);
  const rows = [{ value: number.value, low: number.low, high: number.high, tone }];
  if (isNumber(control?.low))
    rows.push({ value: control.value, low: control.low, high: control.high, tone: "control" });
  const spoken = `${number.title} ${intervalText(number)}${control ? `; control, ${control.title}: ${intervalText(control)}` : ""}`;
  return el(
    "article",
    { class: `number ${tone}` },
    el("h3", {}, term(number.metric, number.title)),
    el("p", { class: "value" }, signed(number.value), " ", el("small", {}, number.unit ?? "")),
    el(
      "p",
      { class: "range" },
      isNumber(number.low) ? `95 % interval ${form(number.low)} … ${form(number.high)}` : "no interval",
    ),
    isNumber(number.start) && el("p", { class: "range" }, `at the start ${form(number.start)}`),
    forest(rows, spoken),
    control &&
      el(
        "p",
        { class: "control" },
        el("span", { class: "dot", "aria-hidden": "true" }),
        "Control: ",
        term(control.metric, control.title),
        " ",
        el("span", { class: "figure" }, intervalText(control)),
      ),
    el("p", { class: "sentence" }, coded(number.sentence ?? "")),
  );
}

// Value (low … high), all with the value's own number of decimals.
function intervalText(found, form = null) {
  if (!found || !isNumber(found.value ?? found.mean)) return DASH;
  if (form === null && !isNumber(found.low)) return plain(found.value ?? found.mean);
  form ??= signedLike(found.value ?? found.mean);
  const value = form(found.value ?? found.mean);
  return isNumber(found.low) && isNumber(found.high) ? `${value} (${form(found.low)} … ${form(found.high)})` : value;
}
