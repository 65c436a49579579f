"use strict";
// The two critics (how well they predict, by step, calibrated or not) and the weight each has in the mixture.

function criticsPart(data) {
  const { critics } = data;
  if (!critics)
    return data.absent?.critics
      ? el("div", { class: "part" }, el("h3", {}, "Critics"), absentLine(data, "critics", ""))
      : null;
  const figures = [];
  const figure = (title, name, settings) => {
    const holder = el("div", {});
    const form = (value) => plain(value, 2);
    const made = el(
      "figure",
      {},
      el("figcaption", {}, el("h4", {}, title), name && el("span", { class: "terms" }, term(name, "what is this?"))),
      holder,
      numbersTable(settings.axis, settings.x, settings.lines, form, title),
    );
    figures.push(lazily(made, () => charts.draw(holder, { label: title, form, ...settings })));
  };
  if (critics.windows?.length) {
    const lines = critics.names.map((label, critic) => ({ label, y: critics.r2[critic], points: true }));
    critics.r2_within &&
      critics.names.forEach((label, critic) =>
        lines.push({ label: `${label}, within steps`, y: critics.r2_within[critic], dash: [5, 4], colour: critic }),
      );
    if (isNumber(critics.needed))
      lines.push({
        label: "needed",
        y: critics.windows.map(() => critics.needed),
        thin: true,
        dash: [2, 4],
        colour: 5,
      });
    figure("How well they predict: R² on fresh thoughts", "r2", {
      x: critics.windows,
      lines,
      axis: "windows",
      floor: -1,
    });
  }
  if (critics.per_step?.steps?.length && critics.per_step.r2[0]?.length) {
    const lines = critics.names.map((label, critic) => ({
      label,
      y: critics.per_step.r2[critic].at(-1),
      points: true,
    }));
    figure("R² by step of the thought, last window", "r2_per_step", {
      x: critics.per_step.steps,
      lines,
      axis: "step",
      floor: -1,
    });
  }
  calibrationFigures(critics, figure);
  return figures.length
    ? el(
        "div",
        { class: "part" },
        el("h3", {}, "Critics"),
        el(
          "p",
          { class: "aside" },
          "R² below −1 (worse than no critic at all) lies under the lower edge; its number is in the legend.",
        ),
        el("div", { class: "grid" }, figures),
      )
    : null;
}

function calibrationFigures(critics, figure) {
  const rows = critics.calibration ?? [];
  const last = Math.max(...rows.map((row) => row.window));
  for (const row of rows.filter((one) => one.window === last)) {
    const order = row.predicted
      .map((_, index) => index)
      .filter((index) => isNumber(row.predicted[index]))
      .sort((a, b) => row.predicted[a] - row.predicted[b]);
    const by = (column) => column && order.map((index) => column[index]);
    const name = critics.names[row.critic] ?? `critic ${row.critic + 1}`;
    figure(`Calibration of ${name}, window ${row.window}`, null, {
      x: by(row.predicted),
      axis: "predicted return",
      diagonal: true,
      zero: false,
      lines: [
        {
          label: "mean return",
          y: by(row.returned),
          low: by(row.low),
          high: by(row.high),
          points: true,
          colour: row.critic,
        },
      ],
    });
  }
}

function weightsPart(data) {
  const { weights } = data;
  if (!weights?.windows?.length) return null;
  const holder = el("div", {});
  const spread = (sign) =>
    weights.mean.map((value, index) =>
      isNumber(value) && isNumber(weights.deviation?.[index]) ? value + sign * weights.deviation[index] : null,
    );
  const lines = [
    { label: "mean weight (band: ± deviation)", y: weights.mean, low: spread(-1), high: spread(1), points: true },
  ];
  const form = (value) => plain(value, 3);
  const first = lazily(
    el(
      "figure",
      {},
      el(
        "figcaption",
        {},
        el("h4", {}, "Weight of critic 1 in the mixture"),
        el("span", { class: "terms" }, term("weight_mean", "what is this?")),
      ),
      holder,
      numbersTable("windows", weights.windows, lines, form, "Weight of critic 1"),
    ),
    () =>
      charts.draw(holder, {
        label: "Weight of critic 1",
        x: weights.windows,
        axis: "windows",
        lines,
        form,
        zero: false,
      }),
  );
  return el(
    "div",
    { class: "part" },
    el("h3", {}, "Weights"),
    el("div", { class: "grid" }, first, weights.histogram?.length > 0 && histogramFigure(weights.histogram.at(-1))),
  );
}

function histogramFigure({ window, edges, count: counts }) {
  const most = Math.max(...counts, 1),
    wide = 300 / counts.length;
  const bars = counts.map((value, index) =>
    svg("rect", {
      x: (index * wide + 1).toFixed(1),
      width: (wide - 2).toFixed(1),
      y: (120 - (112 * value) / most).toFixed(1),
      height: ((112 * value) / most).toFixed(1),
    }),
  );
  const fullest = counts.indexOf(Math.max(...counts));
  const spoken = `Histogram of weights in window ${window}: most between ${fixed(edges[fullest])} and ${fixed(edges[fullest + 1])}`;
  return el(
    "figure",
    {},
    el("figcaption", {}, el("h4", {}, `Distribution of weights, window ${window}`)),
    svg("svg", { viewBox: "0 0 300 122", class: "histogram", role: "img", "aria-label": spoken }, bars),
    el("p", { class: "ends" }, el("span", {}, plain(edges[0], 2)), el("span", {}, plain(edges.at(-1), 2))),
  );
}
