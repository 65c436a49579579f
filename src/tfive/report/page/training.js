"use strict";
// Training: curves over one chosen axis, the phases of a window, the critics, the mixture's weights, and what it all cost.

function trainingSection(data, state) {
  const parts = [curvesPart(data, state), timelinePart(data), criticsPart(data), weightsPart(data), eventsPart(data), accountPart(data)].filter(Boolean);
  if (!parts.length) return data.kind === "run" ? section("training", "Training", absentLine(data, "charts", "No window has closed yet, so there are no curves.")) : null;
  return section("training", "Training", parts);
}

function absentLine(data, name, otherwise) {
  return el("p", { class: "absent" }, coded(data.absent?.[name] ?? otherwise));
}

// A figure that draws itself when it comes near the window (all at once before printing).
function lazily(figure, draw) {
  figure.drawLater = () => { figure.drawLater = null; lazily.watcher.unobserve(figure); draw(); };
  lazily.watcher ??= new IntersectionObserver((seen) => {
    for (const entry of seen) if (entry.isIntersecting) entry.target.drawLater?.();
  }, { rootMargin: "300px" });
  figure.classList.add("later");
  lazily.watcher.observe(figure);
  return figure;
}

// Measures that a part of their own shows, so that no curve stands twice on the page.
const SHOWN_APART = { r2: "critics", r2_within: "critics", weight_mean: "weights", weight_deviation: "weights" };

function chartsOf(data) {
  const apart = (name) => Boolean(data[SHOWN_APART[name.replace(/\.\d+$/, "")]]?.windows?.length);
  return (data.charts ?? []).map((chart) => ({ ...chart, series: chart.series.filter((name) => data.series?.[chart.x]?.[name]?.value?.some(isNumber)) }))
    .filter((chart) => chart.series.length && data.x?.[chart.x] && !chart.series.every(apart));
}

function curvesPart(data, state) {
  const shown = chartsOf(data);
  if (!shown.length) return null;
  const axes = (data.axes ?? []).filter((axis) => shown.some((chart) => data.x[chart.x][axis.id]?.some(isNumber)));
  if (!axes.some((axis) => axis.id === state.axis)) state.axis = axes[0]?.id;
  const grid = el("div", { class: "grid" });
  const draw = () => {
    charts.forget(grid);
    fill(grid, shown.filter((chart) => chart.open).map((chart) => curveFigure(data, chart, state.axis)));
    const rest = shown.filter((chart) => !chart.open);
    if (rest.length) {
      const inner = el("div", { class: "grid" });
      const more = el("details", { class: "wide", open: state.more }, el("summary", {}, `${count(rest.length, "more chart")}`), inner);
      const open = () => { state.more = more.open; if (more.open && !inner.hasChildNodes()) put(inner, rest.map((chart) => curveFigure(data, chart, state.axis))); };
      more.addEventListener("toggle", open);
      open();
      grid.append(more);
    }
  };
  draw();
  return el("div", { class: "part" }, el("div", { class: "controls" },
    chooser("Horizontal axis", "axis", axes, state.axis, (axis) => { state.axis = axis; draw(); }),
    el("p", { class: "aside" }, "Drag across a chart to zoom, double-click to see all of it. Bands are 95 % intervals.")), grid);
}

function curveFigure(data, chart, axis) {
  const x = data.x[chart.x][axis];
  const axisTitle = data.axes.find((one) => one.id === axis).title;
  if (!x) return el("figure", {}, el("figcaption", {}, el("h3", {}, chart.title)), el("p", { class: "absent" }, `The ${axisTitle} of these measurements were not kept.`));
  const holder = el("div", {});
  const lines = chart.series.map((name) => ({ label: titleOf(name), ...pick(data.series[chart.x][name]) }));
  const form = chart.unit === "share" ? percent : (value) => (chart.zero ? signed(value) : plain(value));
  const figure = el("figure", {},
    el("figcaption", {}, el("h3", {}, chart.title), el("span", { class: "aside" }, chart.unit ?? ""),
      el("span", { class: "terms" }, chart.series.map((name) => term(name)))),
    holder, numbersTable(axisTitle, x, lines, form, chart.title));
  return lazily(figure, () => charts.draw(holder, { label: chart.title, x, lines, axis: axisTitle, form, zero: chart.zero }));
}

function pick(series) {
  return { y: series.value, low: series.low ?? undefined, high: series.high ?? undefined };
}

// The numbers behind a picture, for those who want or need to read them.
function numbersTable(axis, x, lines, form, label) {
  const details = el("details", { class: "behind" }, el("summary", {}, "Numbers"));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) {
      const rows = x.map((at, index) => [plain(at, 1), ...lines.map((line) => charts.valueText(line, line.y[index], index, form))]);
      details.append(table([axis, ...lines.map((line) => line.label)], rows, { label, class: "compact" }));
    }
  });
  return details;
}

function timelinePart(data) {
  const { timeline } = data;
  if (!timeline?.windows?.length) return null;
  const total = timeline.total.reduce((sum, value) => sum + (value ?? 0), 0) || 1;
  const longest = Math.max(...timeline.seconds.map((row) => row.reduce((sum, value) => sum + (value ?? 0), 0))) || 1;
  const stride = Math.ceil(timeline.windows.length / 60);
  const shown = timeline.windows.map((window, row) => ({ window, row })).filter(({ row }) => row % stride === 0);
  const bars = shown.map(({ window, row }) => {
    const all = timeline.seconds[row].reduce((sum, value) => sum + (value ?? 0), 0);
    const bar = el("div", { class: "phases", role: "img", "aria-label": `window ${window}: ${duration(all)}` }, timeline.phases.map((phase, index) => {
      const seconds = timeline.seconds[row][index] ?? 0;
      if (!seconds) return null;
      const part = el("span", { class: `phase p${index % 8}`, title: `${phase} ${duration(seconds)}` });
      part.style.width = `${(100 * seconds) / longest}%`;
      return part;
    }));
    return [el("span", { class: "at" }, String(window)), bar, el("span", { class: "figure" }, duration(all))];
  });
  const legend = el("ul", { class: "legend" }, timeline.phases.map((phase, index) => el("li", {},
    el("span", { class: `swatch phase p${index % 8}` }), term(phase, phase.replaceAll("_", " ")), el("span", { class: "figure" }, ` ${duration(timeline.total[index])}, ${percent((timeline.total[index] ?? 0) / total)}`))));
  return el("div", { class: "part" }, el("h3", {}, "Where the time of a window goes"),
    el("p", { class: "aside" }, `A window took ${duration(total / timeline.windows.length)} on average, ${duration(total)} in all${stride > 1 ? `; every ${stride}th of ${timeline.windows.length} windows is drawn` : ""}.`),
    legend, el("div", { class: "timeline" }, bars));
}

function criticsPart(data) {
  const { critics } = data;
  if (!critics) return data.absent?.critics ? el("div", { class: "part" }, el("h3", {}, "Critics"), absentLine(data, "critics", "")) : null;
  const figures = [];
  const figure = (title, name, settings) => {
    const holder = el("div", {});
    const form = (value) => plain(value, 2);
    const made = el("figure", {}, el("figcaption", {}, el("h4", {}, title), name && el("span", { class: "terms" }, term(name, "what is this?"))), holder,
      numbersTable(settings.axis, settings.x, settings.lines, form, title));
    figures.push(lazily(made, () => charts.draw(holder, { label: title, form, ...settings })));
  };
  if (critics.windows?.length) {
    const lines = critics.names.map((label, critic) => ({ label, y: critics.r2[critic], points: true }));
    critics.r2_within && critics.names.forEach((label, critic) => lines.push({ label: `${label}, within steps`, y: critics.r2_within[critic], dash: [5, 4], colour: critic }));
    if (isNumber(critics.needed)) lines.push({ label: "needed", y: critics.windows.map(() => critics.needed), thin: true, dash: [2, 4], colour: 5 });
    figure("How well they predict: R² on fresh thoughts", "r2", { x: critics.windows, lines, axis: "windows" });
  }
  if (critics.per_step?.steps?.length && critics.per_step.r2[0]?.length) {
    const lines = critics.names.map((label, critic) => ({ label, y: critics.per_step.r2[critic].at(-1), points: true }));
    figure("R² by step of the thought, last window", "r2_per_step", { x: critics.per_step.steps, lines, axis: "step" });
  }
  calibrationFigures(critics, figure);
  return figures.length ? el("div", { class: "part" }, el("h3", {}, "Critics"), el("div", { class: "grid" }, figures)) : null;
}

function calibrationFigures(critics, figure) {
  const rows = critics.calibration ?? [];
  const last = Math.max(...rows.map((row) => row.window));
  for (const row of rows.filter((one) => one.window === last)) {
    const order = row.predicted.map((_, index) => index).filter((index) => isNumber(row.predicted[index])).sort((a, b) => row.predicted[a] - row.predicted[b]);
    const by = (column) => column && order.map((index) => column[index]);
    const name = critics.names[row.critic] ?? `critic ${row.critic + 1}`;
    figure(`Calibration of ${name}, window ${row.window}`, null, { x: by(row.predicted), axis: "predicted return", diagonal: true, zero: false,
      lines: [{ label: "mean return", y: by(row.returned), low: by(row.low), high: by(row.high), points: true, colour: row.critic }] });
  }
}

function weightsPart(data) {
  const { weights } = data;
  if (!weights?.windows?.length) return null;
  const holder = el("div", {});
  const spread = (sign) => weights.mean.map((value, index) => (isNumber(value) && isNumber(weights.deviation?.[index]) ? value + sign * weights.deviation[index] : null));
  const lines = [{ label: "mean weight (band: ± deviation)", y: weights.mean, low: spread(-1), high: spread(1), points: true }];
  const form = (value) => plain(value, 3);
  const first = lazily(el("figure", {}, el("figcaption", {}, el("h4", {}, "Weight of critic 1 in the mixture"), el("span", { class: "terms" }, term("weight_mean", "what is this?"))),
    holder, numbersTable("windows", weights.windows, lines, form, "Weight of critic 1")),
    () => charts.draw(holder, { label: "Weight of critic 1", x: weights.windows, axis: "windows", lines, form, zero: false }));
  return el("div", { class: "part" }, el("h3", {}, "Weights"), el("div", { class: "grid" }, first, weights.histogram?.length > 0 && histogramFigure(weights.histogram.at(-1))));
}

function histogramFigure({ window, edges, count: counts }) {
  const most = Math.max(...counts, 1), wide = 300 / counts.length;
  const bars = counts.map((value, index) => svg("rect", { x: (index * wide + 1).toFixed(1), width: (wide - 2).toFixed(1), y: (120 - (112 * value) / most).toFixed(1), height: ((112 * value) / most).toFixed(1) }));
  const fullest = counts.indexOf(Math.max(...counts));
  const spoken = `Histogram of weights in window ${window}: most lie between ${plain(edges[fullest], 2)} and ${plain(edges[fullest + 1], 2)}`;
  return el("figure", {}, el("figcaption", {}, el("h4", {}, `Distribution of weights, window ${window}`)),
    svg("svg", { viewBox: "0 0 300 122", class: "histogram", role: "img", "aria-label": spoken }, bars),
    el("p", { class: "ends" }, el("span", {}, plain(edges[0], 2)), el("span", {}, plain(edges.at(-1), 2))));
}

function eventsPart(data) {
  const { events } = data;
  if (!events?.event?.length) return null;
  const rows = events.event.map((event, index) => [plain(events.window?.[index]), duration(events.seconds?.[index]), event, coded(events.detail?.[index] ?? "")]);
  return el("details", { class: "part" }, el("summary", {}, `${count(rows.length, "event")}: what changed and when`),
    table(["window", "after", "event", "detail"], rows, { label: "Events" }));
}

function accountPart(data) {
  const { account } = data;
  if (!account) return null;
  const whole = account.phases?.map((phase, index) => ({ phase, seconds: account.seconds[index] })).filter(({ phase }) => !phase.includes("/")) ?? [];
  const spent = whole.reduce((sum, { seconds }) => sum + (seconds ?? 0), 0) || 1;
  const words = (name) => String(name).replaceAll("_", " ");
  return el("div", { class: "part" }, el("h3", {}, "What it cost"),
    isNumber(account.wall_seconds) && el("p", {}, `${duration(account.wall_seconds)} from start to end.`),
    el("div", { class: "pair" },
      account.roles?.length > 0 && table(["role", ...account.kinds.map((kind) => term(kind, words(kind)))], account.roles.map((role, row) => [words(role), ...account.amounts[row].map((value) => plain(value))]), { label: "Tokens and thoughts by role" }),
      whole.length > 0 && table(["phase", "seconds", "share"], whole.map(({ phase, seconds }) => [words(phase), plain(seconds, 1), percent((seconds ?? 0) / spent)]), { label: "Seconds by phase" })));
}
