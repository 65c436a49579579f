"use strict";
// Training: curves over one chosen axis, the phases of a window, its critics and events, and what it all cost.

function trainingSection(data, state) {
  const parts = [
    curvesPart(data, state),
    timelinePart(data),
    criticsPart(data),
    weightsPart(data),
    eventsPart(data),
    accountPart(data),
  ].filter(Boolean);
  if (!parts.length)
    return data.kind === "run"
      ? section("training", "Training", absentLine(data, "charts", "No window has closed yet, so there are no curves."))
      : null;
  return section("training", "Training", parts);
}

function absentLine(data, name, otherwise) {
  return el("p", { class: "absent" }, coded(data.absent?.[name] ?? otherwise));
}

// A figure that draws itself when it comes near the window (all at once before printing).
function lazily(figure, draw) {
  figure.drawLater = () => {
    figure.drawLater = null;
    lazily.watcher.unobserve(figure);
    draw();
  };
  lazily.watcher ??= new IntersectionObserver(
    (seen) => {
      for (const entry of seen) if (entry.isIntersecting) entry.target.drawLater?.();
    },
    { rootMargin: "300px" },
  );
  figure.classList.add("later");
  lazily.watcher.observe(figure);
  return figure;
}

// Measures that a part of their own shows, so that no curve stands twice on the page.
const SHOWN_APART = { r2: "critics", r2_within: "critics", weight_mean: "weights", weight_deviation: "weights" };

function chartsOf(data) {
  const apart = (name) => Boolean(data[SHOWN_APART[name.replace(/\.\d+$/, "")]]?.windows?.length);
  return (data.charts ?? [])
    .map((chart) => ({
      ...chart,
      series: chart.series.filter((name) => data.series?.[chart.x]?.[name]?.value?.some(isNumber)),
    }))
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
    fill(
      grid,
      shown.filter((chart) => chart.open).map((chart) => curveFigure(data, chart, state.axis)),
    );
    const rest = shown.filter((chart) => !chart.open);
    if (rest.length) {
      const inner = el("div", { class: "grid" });
      const more = el(
        "details",
        { class: "wide", open: state.more },
        el("summary", {}, `${count(rest.length, "more chart")}`),
        inner,
      );
      const open = () => {
        state.more = more.open;
        if (more.open && !inner.hasChildNodes())
          put(
            inner,
            rest.map((chart) => curveFigure(data, chart, state.axis)),
          );
      };
      more.addEventListener("toggle", open);
      open();
      grid.append(more);
    }
  };
  draw();
  return el(
    "div",
    { class: "part" },
    el(
      "div",
      { class: "controls" },
      chooser("Horizontal axis", "axis", axes, state.axis, (axis) => {
        state.axis = axis;
        draw();
      }),
      el(
        "p",
        { class: "aside" },
        "Drag across a chart to zoom, double-click to see all of it. Bands are 95 % intervals.",
      ),
    ),
    grid,
  );
}

function curveFigure(data, chart, axis) {
  const x = data.x[chart.x][axis];
  const axisTitle = data.axes.find((one) => one.id === axis).title;
  if (!x)
    return el(
      "figure",
      {},
      el("figcaption", {}, el("h3", {}, chart.title)),
      el("p", { class: "absent" }, `The ${axisTitle} of these measurements were not kept.`),
    );
  const holder = el("div", {});
  const lines = chart.series.map((name) => ({ label: titleOf(name), ...pick(data.series[chart.x][name]) }));
  const form = chart.unit === "share" ? percent : (value) => (chart.zero ? signed(value) : plain(value));
  const figure = el(
    "figure",
    {},
    el(
      "figcaption",
      {},
      el("h3", {}, chart.title),
      el("span", { class: "aside" }, chart.unit ?? ""),
      el(
        "span",
        { class: "terms" },
        chart.series.map((name) => term(name)),
      ),
    ),
    holder,
    numbersTable(axisTitle, x, lines, form, chart.title),
  );
  return lazily(figure, () =>
    charts.draw(holder, { label: chart.title, x, lines, axis: axisTitle, form, zero: chart.zero }),
  );
}

function pick(series) {
  return { y: series.value, low: series.low ?? undefined, high: series.high ?? undefined };
}

// The numbers behind a picture, for those who want or need to read them.
function numbersTable(axis, x, lines, form, label) {
  const details = el("details", { class: "behind" }, el("summary", {}, "Numbers"));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) {
      const rows = x.map((at, index) => [
        plain(at, 1),
        ...lines.map((line) => charts.valueText(line, line.y[index], index, form)),
      ]);
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
    const bar = el(
      "div",
      { class: "phases", role: "img", "aria-label": `window ${window}: ${duration(all)}` },
      timeline.phases.map((phase, index) => {
        const seconds = timeline.seconds[row][index] ?? 0;
        if (!seconds) return null;
        const part = el("span", { class: `phase p${index % 8}`, title: `${phase} ${duration(seconds)}` });
        part.style.width = `${(100 * seconds) / longest}%`;
        return part;
      }),
    );
    return [el("span", { class: "at" }, String(window)), bar, el("span", { class: "figure" }, duration(all))];
  });
  const legend = el(
    "ul",
    { class: "legend" },
    timeline.phases.map((phase, index) =>
      el(
        "li",
        {},
        el("span", { class: `swatch phase p${index % 8}` }),
        term(phase, phase.replaceAll("_", " ")),
        el(
          "span",
          { class: "figure" },
          ` ${duration(timeline.total[index])}, ${percent((timeline.total[index] ?? 0) / total)}`,
        ),
      ),
    ),
  );
  return el(
    "div",
    { class: "part" },
    el("h3", {}, "Where the time of a window goes"),
    el(
      "p",
      { class: "aside" },
      `A window took ${duration(total / timeline.windows.length)} on average, ${duration(total)} in all.`,
      " Measuring and diagnosing are left out; all seconds stand under Seconds by phase.",
      stride > 1 && ` One window in ${stride} is drawn.`,
    ),
    legend,
    el("div", { class: "timeline" }, bars),
  );
}

function eventsPart(data) {
  const { events } = data;
  if (!events?.event?.length) return null;
  const rows = events.event.map((event, index) => [
    plain(events.window?.[index]),
    duration(events.seconds?.[index]),
    event,
    coded(events.detail?.[index] ?? ""),
  ]);
  return el(
    "details",
    { class: "part" },
    el("summary", {}, `${count(rows.length, "event")}: what changed and when`),
    table(["window", "after", "event", "detail"], rows, { label: "Events" }),
  );
}

function accountPart(data) {
  const { account } = data;
  if (!account) return null;
  const whole =
    account.phases
      ?.map((phase, index) => ({ phase, seconds: account.seconds[index] }))
      .filter(({ phase }) => !phase.includes("/")) ?? [];
  const spent = whole.reduce((sum, { seconds }) => sum + (seconds ?? 0), 0) || 1;
  const words = (name) => String(name).replaceAll("_", " ");
  return el(
    "div",
    { class: "part" },
    el("h3", {}, "What it cost"),
    isNumber(account.wall_seconds) && el("p", {}, `${duration(account.wall_seconds)} from start to end.`),
    el(
      "div",
      { class: "pair" },
      account.roles?.length > 0 &&
        table(
          ["role", ...account.kinds.map((kind) => term(kind, words(kind)))],
          account.roles.map((role, row) => [words(role), ...account.amounts[row].map((value) => plain(value))]),
          { label: "Tokens and thoughts by role" },
        ),
      whole.length > 0 &&
        table(
          ["phase", "seconds", "share"],
          whole.map(({ phase, seconds }) => [words(phase), plain(seconds, 1), percent((seconds ?? 0) / spent)]),
          { label: "Seconds by phase" },
        ),
    ),
  );
}
