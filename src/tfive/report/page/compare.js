"use strict";
// Several runs and seeds: methods with intervals, paired differences, curves together, and equal cost by a slider.

function compareSection(data, state) {
  const { compare } = data;
  if (!compare) return null;
  const metrics = compare.metrics.filter(
    (metric) =>
      compare.runs.some((run) => run.series?.[metric]) || compare.methods.some((method) => method.measured?.[metric]),
  );
  if (!metrics.includes(state.metric)) state.metric = metrics.includes("content_gain") ? "content_gain" : metrics[0];
  const body = el("div", {});
  const draw = () => {
    charts.forget(body);
    fill(body, differencesPart(compare, state.metric), equalCostPart(data, state, draw), togetherPart(data, state));
  };
  draw();
  return section(
    "compare",
    "Compare",
    compare.rules?.length > 0 && el("p", {}, coded(compare.rules.join(" "))),
    methodsTable(compare, metrics),
    metrics.length > 1 &&
      el(
        "div",
        { class: "controls" },
        picker(
          "Measure",
          metrics.map((id) => ({ id, title: titleOf(id) })),
          state.metric,
          (metric) => {
            state.metric = metric;
            draw();
          },
        ),
      ),
    body,
    runsTable(compare),
    compare.limits?.length > 0 &&
      el(
        "details",
        { class: "limits" },
        el("summary", {}, "What the comparison does not show"),
        el(
          "ul",
          {},
          compare.limits.map((line) => el("li", {}, coded(line))),
        ),
      ),
  );
}

function methodsTable(compare, metrics) {
  if (!compare.methods.length)
    return el("p", { class: "absent" }, "No run has finished, so there is nothing to compare yet.");
  const shown = metrics.slice(0, 5);
  return el(
    "div",
    { class: "part" },
    el("h3", {}, "At the last measurement"),
    table(
      ["method", "seeds", ...shown.map((metric) => term(metric)), "seconds a step"],
      compare.methods.map((method) => [
        method.label,
        seedsText(method),
        ...shown.map((metric) => intervalText(method.measured?.[metric])),
        plain(method.seconds_per_step),
      ]),
      { label: "Methods at the last measurement", class: "lines" },
    ),
  );
}

function seedsText(method) {
  const lost = [
    method.failed?.length && `${method.failed.length} failed`,
    method.open?.length && `${method.open.length} unfinished`,
  ].filter(Boolean);
  return `${method.seeds?.length ?? 0}${lost.length ? ` (${lost.join(", ")})` : ""}`;
}

function differencesPart(compare, metric) {
  const rows = compare.differences
    .filter((row) => row.measured?.[metric])
    .map((row) => ({ label: row.label, ...row.measured[metric], value: row.measured[metric].mean }));
  if (!rows.length) return null;
  const toned = rows.map((row) => ({ ...row, tone: row.low > 0 ? "good" : row.high < 0 ? "bad" : "none" }));
  const words = (row) =>
    row.low > 0 ? `${compare.reference} is above` : row.high < 0 ? `${compare.reference} is below` : "not told apart";
  return el(
    "div",
    { class: "part" },
    el("h3", {}, `${compare.reference} minus each other, paired by seed and place`),
    el(
      "div",
      { class: "differences" },
      table(
        ["against", term(metric), "in words"],
        toned.map((row) => [row.label, intervalText(row), words(row)]),
        { label: "Paired differences", class: "lines" },
      ),
      forest(
        toned,
        `Paired differences of ${titleOf(metric)}: ${toned.map((row) => `${row.label} ${intervalText(row)}`).join("; ")}`,
      ),
    ),
  );
}

// A run's last measurement within a budget; nothing is interpolated.
function withinBudget(run, axis, metric, budget) {
  const x = run.x?.[axis] ?? [],
    y = run.series?.[metric]?.value ?? [];
  let found = null;
  for (let index = 0; index < x.length; index++)
    if (isNumber(x[index]) && isNumber(y[index]) && x[index] <= budget) found = { used: x[index], value: y[index] };
  return found;
}

function methodsWithin(compare, axis, metric, budget) {
  return compare.methods.map((method) => {
    const found = compare.runs
      .filter((run) => run.label === method.label)
      .map((run) => ({ seed: run.seed, ...withinBudget(run, axis, metric, budget) }))
      .filter((run) => isNumber(run.value));
    const mean = (name) => (found.length ? found.reduce((sum, run) => sum + run[name], 0) / found.length : null);
    return { label: method.label, runs: found, value: mean("value"), used: mean("used") };
  });
}

function equalCostPart(data, state, redraw) {
  const { compare } = data;
  const axes = data.axes.filter((axis) => compare.runs.some((run) => run.x?.[axis.id]?.some((value) => value > 0)));
  if (!axes.length || !compare.methods.length) return null;
  if (!axes.some((axis) => axis.id === state.cost))
    state.cost = axes.find((axis) => axis.id === "seconds")?.id ?? axes[0].id;
  const result = el("div", {});
  const output = el("output", {});
  const range = el("input", { type: "range", min: 0, max: 1000, step: 1, id: "budget-slider" });
  range.value = String(state.budget ?? 1000);
  const draw = () => {
    const most = Math.max(...compare.runs.flatMap((run) => (run.x?.[state.cost] ?? []).filter(isNumber)));
    const budget = (most * Number(range.value)) / 1000;
    const title = axes.find((axis) => axis.id === state.cost).title;
    state.budget = Number(range.value);
    output.textContent = `${plain(budget, 1)} ${title}`;
    range.setAttribute("aria-valuetext", output.textContent);
    const rows = methodsWithin(compare, state.cost, state.metric, budget);
    const reference = rows.find((row) => row.label === compare.reference);
    fill(
      result,
      table(
        ["method", titleOf(state.metric), `minus ${compare.reference}, same seeds`, "runs", `${title} used`],
        rows.map((row) => [
          row.label,
          signed(row.value),
          row === reference ? DASH : signed(pairedDifference(row, reference)),
          plain(row.runs.length),
          plain(row.used, 1),
        ]),
        { label: "At equal cost", class: "lines" },
      ),
    );
  };
  range.addEventListener("input", draw);
  draw();
  return el(
    "div",
    { class: "part" },
    el("h3", {}, "At equal cost"),
    el("p", { class: "aside" }, "Each run’s last measurement within the budget; nothing is interpolated."),
    el(
      "div",
      { class: "controls fields" },
      picker("Cost", axes, state.cost, (cost) => {
        state.cost = cost;
        redraw();
        document.querySelector("#compare .slider").parentElement.querySelector("select").focus();
      }),
      el("label", { class: "slider" }, el("span", {}, "Budget"), range),
      output,
    ),
    result,
  );
}

function pairedDifference(row, reference) {
  const pairs = row.runs
    .map((run) => [run.value, reference?.runs.find((other) => other.seed === run.seed)?.value])
    .filter(([, other]) => isNumber(other));
  return pairs.length ? pairs.reduce((sum, [mine, other]) => sum + mine - other, 0) / pairs.length : null;
}

// All runs on one axis: a colour a method, a line a seed.
function togetherPart(data, state) {
  const { compare } = data;
  const runs = compare.runs.filter(
    (run) => run.series?.[state.metric]?.value?.some(isNumber) && run.x?.[state.cost ?? "windows"],
  );
  if (!runs.length) return null;
  const axis = state.cost ?? "windows";
  const labels = [...new Set(compare.runs.map((run) => run.label))];
  const x = [...new Set(runs.flatMap((run) => run.x[axis].filter(isNumber)))].sort((a, b) => a - b);
  const lines = runs.map((run) => {
    const at = new Map(run.x[axis].map((value, index) => [value, run.series[state.metric].value[index]]));
    return {
      label: `${run.label}, seed ${run.seed}`,
      y: x.map((value) => at.get(value) ?? null),
      colour: labels.indexOf(run.label),
      thin: runs.length > 6,
    };
  });
  const title = data.axes.find((one) => one.id === axis)?.title ?? axis;
  const holder = el("div", {});
  const figure = el(
    "figure",
    { class: "wide" },
    el("figcaption", {}, el("h3", {}, `${titleOf(state.metric)}, every run`)),
    holder,
    numbersTable(title, x, lines, signed, titleOf(state.metric)),
  );
  return lazily(figure, () =>
    charts.draw(holder, { label: titleOf(state.metric), x, lines, axis: title, form: signed, height: 280 }),
  );
}

function runsTable(compare) {
  const rows = compare.runs.map((run) => [
    run.label,
    plain(run.seed),
    run.failure
      ? `${run.state}: ${run.failure}`
      : `${run.state}${run.disturbed ? " (shared the machine: its seconds say little)" : ""}`,
    plain(run.x?.windows?.at(-1)),
    duration(run.x?.seconds?.at(-1)),
    plain(run.x?.thought_tokens?.at(-1)),
  ]);
  return el(
    "details",
    { class: "part" },
    el("summary", {}, count(rows.length, "run")),
    table(["method", "seed", "state", "windows", "time", "thought tokens"], rows, { label: "Every run" }),
  );
}
