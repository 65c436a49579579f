"use strict";
// Benchmarks: results with intervals and verdicts, and every item that was kept, two models side by side.

const OUTCOMES = [
  { id: "all", title: "All items" },
  { id: "first", title: "Only the first right" },
  { id: "second", title: "Only the second right" },
  { id: "right", title: "Both right" },
  { id: "wrong", title: "Both wrong" },
];

class Evaluation {
  constructor(evaluation, kept = {}) {
    this.evaluation = evaluation;
    this.state = {
      task: "",
      outcome: "all",
      search: "",
      first: 0,
      second: Math.min(1, evaluation.models.length - 1),
      item: -1,
      ...kept,
    };
    this.answers =
      evaluation.items?.answers?.map((answers) => {
        const by = new Map();
        answers.item.forEach((item, row) => {
          if (!by.has(item)) by.set(item, []);
          by.get(item).push(row);
        });
        return by;
      }) ?? [];
    this.list = new VirtualList({
      label: "Items",
      id: "item-list",
      rowHeight: 56,
      draw: (row, index) => this.drawRow(row, index),
      choose: (index) => {
        this.state.item = this.found[index];
        this.drawItem();
      },
      open: () => this.view.focus(),
    });
    this.view = el("div", { class: "view", tabindex: -1 });
    this.count = el("p", { class: "count", role: "status" });
    this.none = el("p", { class: "absent", hidden: true }, "No item passes these filters.");
    this.root = section(
      "evaluation",
      "Evaluation",
      this.results(),
      this.evaluation.items?.id?.length
        ? [
            el("h3", {}, "Item by item"),
            this.controls(),
            el(
              "div",
              { class: "explorer" },
              el("div", { class: "side" }, this.count, this.list.box, this.none),
              this.view,
            ),
          ]
        : el("p", { class: "absent" }, "No items were kept with these results."),
    );
    if (this.evaluation.items?.id?.length) this.refresh();
  }

  // The measure that each benchmark is judged by first; all others wait below it.
  results() {
    const others = this.evaluation.tasks.reduce(
      (sum, task) => sum + task.measures.filter((measure) => !measure.primary).length,
      0,
    );
    return el(
      "div",
      { class: "part" },
      this.measures((measure) => measure.primary, "Benchmarks"),
      others > 0 &&
        el(
          "details",
          {},
          el("summary", {}, `${count(others, "more measure")}`),
          this.measures((measure) => !measure.primary, "More measures"),
        ),
    );
  }

  measures(chosen, label) {
    const { models, tasks } = this.evaluation;
    const rows = tasks.flatMap((task) =>
      task.measures.filter(chosen).map((measure) => {
        const form = measure.share
          ? (value) => (isNumber(value) ? `${(100 * value).toFixed(1)} %` : DASH)
          : (value) => plain(value);
        return [
          task.name,
          measure.name,
          plain(task.items),
          ...models.map((_, model) => intervalText(measure.values[model], form)),
          ...(models.length === 2
            ? [
                measure.difference
                  ? intervalText(measure.difference, measure.share ? (value) => signed(100 * value, 1) : signed)
                  : DASH,
                differenceWord(measure.difference),
              ]
            : []),
        ];
      }),
    );
    const names = models.map((model) =>
      model.settings ? explained(model.name, [model.settings, model.folder].filter(Boolean)) : model.name,
    );
    return table(
      [
        "benchmark",
        "measure",
        "items",
        ...names,
        ...(models.length === 2 ? ["second − first, paired", "verdict"] : []),
      ],
      rows,
      { label, class: "lines" },
    );
  }

  controls() {
    const { models, tasks, left_out: leftOut } = this.evaluation;
    const set = (change) => {
      Object.assign(this.state, change);
      this.refresh();
    };
    const search = el("input", {
      type: "search",
      id: "item-search",
      autocomplete: "off",
      oninput: () => set({ search: search.value }),
    });
    search.value = this.state.search;
    const names = models.map((model, id) => ({ id: String(id), title: model.name }));
    return el(
      "div",
      { class: "controls" },
      models.length > 1 && chooser("Show", "outcome", OUTCOMES, this.state.outcome, (outcome) => set({ outcome })),
      el(
        "div",
        { class: "fields" },
        el("label", { class: "field grow" }, el("span", {}, "Search"), search),
        tasks.length > 1 &&
          picker(
            "Benchmark",
            [{ id: "", title: "all" }, ...tasks.map((task, id) => ({ id: String(id), title: task.name }))],
            this.state.task,
            (task) => set({ task }),
          ),
        models.length > 2 && [
          picker("First", names, String(this.state.first), (id) => set({ first: Number(id) })),
          picker("Second", names, String(this.state.second), (id) => set({ second: Number(id) })),
        ],
      ),
      leftOut > 0 && el("p", { class: "aside" }, `${count(leftOut, "item")} left out to keep the page small.`),
    );
  }

  right(model, item) {
    const rows = this.answers[model]?.get(item) ?? [];
    return rows.length ? rows.some((row) => this.evaluation.items.answers[model].correct[row] === 1) : null;
  }

  passes(item) {
    const { task, outcome, search, first, second } = this.state;
    const { items } = this.evaluation;
    if (task !== "" && items.task[item] !== Number(task)) return false;
    const a = this.right(first, item),
      b = this.right(second, item);
    const rules = {
      first: a && b === false,
      second: b && a === false,
      right: a && b,
      wrong: a === false && b === false,
    };
    if (outcome !== "all" && !rules[outcome]) return false;
    return (
      !search ||
      `${items.id[item]}\n${items.question[item]}\n${items.gold[item]}`.toLowerCase().includes(search.toLowerCase())
    );
  }

  refresh() {
    this.found = this.evaluation.items.id.map((_, item) => item).filter((item) => this.passes(item));
    if (!this.found.includes(this.state.item)) this.state.item = this.found[0] ?? -1;
    this.count.textContent = `${plain(this.found.length)} of ${count(this.evaluation.items.id.length, "item")}`;
    this.list.box.hidden = this.found.length === 0;
    this.none.hidden = this.found.length > 0;
    this.list.show(this.found.length, this.found.indexOf(this.state.item));
    this.drawItem();
  }

  drawRow(row, index) {
    const item = this.found[index];
    const { items, tasks, models } = this.evaluation;
    const shown = models.length > 1 ? [this.state.first, this.state.second] : [0];
    put(row, [
      el(
        "span",
        { class: "marks" },
        shown.map((model) => outcomeMark(this.right(model, item))),
      ),
      el(
        "span",
        { class: "what" },
        el("bdi", { class: "thought" }, items.question[item].replace(/\s+/g, " ").slice(0, 140)),
        el("bdi", { class: "context" }, `${tasks[items.task[item]]?.name ?? ""} ${items.id[item]}`),
      ),
    ]);
  }

  drawItem() {
    const { item, first, second } = this.state;
    const { items, models } = this.evaluation;
    if (item < 0) {
      fill(this.view);
      return;
    }
    const choices = items.choices?.[item] ?? [];
    fill(
      this.view,
      el("h4", {}, "Question"),
      el("div", { class: "passage", dir: "auto" }, items.question[item]),
      choices.length > 0 &&
        el(
          "ol",
          { class: "choices" },
          choices.map((choice) => el("li", {}, choice)),
        ),
      el("p", {}, el("strong", {}, "Right answer: "), el("bdi", {}, items.gold[item])),
      el(
        "div",
        { class: "answers" },
        (models.length > 1 ? [first, second] : [0]).map((model) => this.answer(model, item)),
      ),
    );
  }

  answer(model, item) {
    const answers = this.evaluation.items.answers[model];
    const rows = this.answers[model]?.get(item) ?? [];
    return el(
      "article",
      {},
      el("h4", {}, this.evaluation.models[model].name),
      rows.length === 0 && el("p", { class: "absent" }, "No answer was kept."),
      rows.map((row) => {
        const facts = [
          answers.ended?.[row] && `ended by ${answers.ended[row]}`,
          isNumber(answers.tokens?.[row]) && count(answers.tokens[row], "token"),
          answers.thoughts?.[row] > 0 &&
            `${count(answers.thoughts[row], "thought")} of ${count(answers.thought_tokens[row], "token")}`,
          answers.cut?.[row] && "shortened here",
        ].filter(Boolean);
        return el(
          "div",
          { class: "answer" },
          el(
            "p",
            {},
            outcomeMark(answers.correct[row] === null ? null : answers.correct[row] === 1),
            " ",
            el("bdi", {}, answers.extracted[row] ?? "no answer found"),
          ),
          el("div", { class: "passage", dir: "auto" }, answers.output[row] ?? ""),
          el("p", { class: "aside" }, facts.join(" · ")),
          answers.steps?.[row]?.length > 0 &&
            el(
              "details",
              {},
              el("summary", {}, "How the verdict came about"),
              el(
                "ol",
                {},
                answers.steps[row].map((step) => el("li", {}, step)),
              ),
            ),
        );
      }),
    );
  }
}

function outcomeMark(right) {
  const [kind, sign, word] =
    right === null ? ["none", "?", "not judged"] : right ? ["good", "✓", "right"] : ["bad", "✗", "wrong"];
  return el("span", { class: `outcome ${kind}`, role: "img", "aria-label": word }, sign);
}

function differenceWord(difference) {
  if (!difference) return DASH;
  return difference.low > 0 ? "the second is better" : difference.high < 0 ? "the first is better" : "not told apart";
}
