"use strict";
// Curves: uPlot in the page's colours, intervals as bands, zoom by dragging, values under the pointer.

const charts = {
  drawn: new Set(),
  zooms: new Map(),
  colours: ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6", "--line-7", "--line-8"],

  // A colour of the theme as the canvas understands it; the browser resolves light and dark.
  css(name, alpha = 1) {
    this.probe ??= document.body.appendChild(el("span", { class: "probe", "aria-hidden": "true" }));
    this.probe.style.color = `var(${name})`;
    const [red, green, blue] = getComputedStyle(this.probe).color.match(/[\d.]+/g);
    return `rgba(${red}, ${green}, ${blue}, ${alpha})`;
  },

  // lines: [{label, y, low?, high?, dash?, points?}] over one x; returns the element.
  draw(
    holder,
    {
      label,
      x,
      lines,
      axis,
      height = 210,
      form = (value) => plain(value),
      diagonal = false,
      zero = true,
      floor = -Infinity,
    },
  ) {
    const chart = { holder, label, x, lines, axis, height, form, diagonal, zero, floor, plot: null };
    holder.classList.add("chart");
    this.drawn.add(chart);
    this.build(chart);
    return chart;
  },

  build(chart) {
    chart.plot?.destroy();
    const { x, lines, form } = chart;
    const data = [x];
    const series = [{ label: chart.axis, value: (_, value) => (value === null ? DASH : plain(value, 2)) }];
    const bands = [];
    lines.forEach((line, index) => {
      const name = this.colours[(line.colour ?? index) % this.colours.length];
      const colour = this.css(name);
      const lone = x.length < 2;
      series.push({
        label: line.label,
        stroke: colour,
        width: line.thin ? 1 : 2,
        dash: line.dash,
        spanGaps: true,
        points: { show: lone || Boolean(line.points), size: 6 },
        paths: line.bare ? () => null : undefined,
        value: (_, value, __, row) => this.valueText(line, value, row, form),
      });
      data.push(line.y);
      if (line.low && line.high) {
        const first = series.length;
        for (const edge of [line.high, line.low]) {
          series.push({
            show: true,
            stroke: "transparent",
            width: 0,
            points: { show: false },
            spanGaps: true,
            class: "edge",
          });
          data.push(edge);
        }
        bands.push({ series: [first, first + 1], fill: this.css(name, 0.16) });
      }
    });
    const ink = this.css("--quiet");
    const rule = { stroke: this.css("--rule"), width: 1 };
    const axes = { stroke: ink, grid: rule, ticks: { ...rule, size: 4 }, font: "12px system-ui, sans-serif" };
    const width = Math.max(220, chart.holder.clientWidth);
    chart.plot = new uPlot(
      {
        width,
        height: chart.height,
        legend: { show: true, live: true },
        bands,
        series,
        scales: {
          x: { time: false, range: this.rangeOf(x) },
          y: { range: (_, least, most) => this.heights(Math.max(least, chart.floor), most) },
        },
        axes: [
          { ...axes, size: 34, values: (_, ticks) => ticks.map((tick) => this.short(tick)) },
          { ...axes, size: 56, values: (_, ticks) => ticks.map((tick) => this.short(tick)) },
        ],
        cursor: { drag: { x: true, y: false, setScale: true }, points: { size: 7 } },
        hooks: {
          drawAxes: [(plot) => this.guides(plot, chart)],
          setCursor: [(plot) => this.rest(plot)],
          ready: [(plot) => this.rest(plot)],
          setSelect: [(plot) => this.zoomed(plot, chart)],
        },
      },
      data,
      chart.holder,
    );
    chart.plot.over.addEventListener("dblclick", () => this.zooms.delete(this.key(chart)));
    if (this.zooms.has(this.key(chart))) chart.plot.setScale("x", this.zooms.get(this.key(chart)));
    chart.plot.root.setAttribute("role", "img");
    chart.plot.root.setAttribute("aria-label", this.describe(chart));
  },

  // A zoom outlives the drawing: of another theme, of newer data. A double click ends it.
  zoomed(plot, chart) {
    const { left, width } = plot.select;
    this.zooms.set(this.key(chart), { min: plot.posToVal(left, "x"), max: plot.posToVal(left + width, "x") });
  },

  key(chart) {
    return `${chart.label} by ${chart.axis}`;
  },

  // Without a pointer the legend says how it ended.
  rest(plot) {
    if (!isNumber(plot.cursor.idx)) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
  },

  rangeOf(x) {
    const least = Math.min(...x),
      most = Math.max(...x);
    return least === most ? () => [least - 1, most + 1] : undefined;
  },

  // A level line (and one that lies below the floor) stands in the middle of a little room; everything else gets a margin of a tenth.
  heights(least, most) {
    if (!isNumber(least) || !isNumber(most)) return [0, 1];
    if (least >= most) return [least - (Math.abs(least) || 0.1) / 10, most + (Math.abs(most) || 0.1) / 10];
    return uPlot.rangeNum(least, most, 0.1, true);
  },

  short(tick) {
    const size = Math.abs(tick);
    const sign = tick < 0 ? MINUS : "";
    if (size >= 1e9) return `${sign}${+(size / 1e9).toPrecision(3)}G`;
    if (size >= 1e6) return `${sign}${+(size / 1e6).toPrecision(3)}M`;
    if (size >= 1e4) return `${sign}${+(size / 1e3).toPrecision(3)}k`;
    return sign + (+size.toPrecision(6)).toString();
  },

  valueText(line, value, row, form) {
    if (!isNumber(value)) return DASH;
    const low = line.low?.[row],
      high = line.high?.[row];
    return isNumber(low) && isNumber(high) ? `${form(value)} (${form(low)} … ${form(high)})` : form(value);
  },

  // What a screen reader hears instead of the picture; the numbers themselves stand in the table below it.
  describe(chart) {
    const parts = chart.lines
      .filter((line) => !line.thin)
      .slice(0, 8)
      .map((line) => {
        const known = line.y.filter(isNumber);
        return known.length
          ? `${line.label} from ${chart.form(known[0])} to ${chart.form(known.at(-1))}`
          : `${line.label} not measured`;
      });
    return `${chart.label} by ${chart.axis}: ${parts.join("; ")}`;
  },

  guides(plot, chart) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = this.css("--quiet");
    ctx.setLineDash([4, 4]);
    ctx.beginPath();
    if (chart.diagonal) {
      const low = Math.max(plot.scales.x.min, plot.scales.y.min),
        high = Math.min(plot.scales.x.max, plot.scales.y.max);
      ctx.moveTo(plot.valToPos(low, "x", true), plot.valToPos(low, "y", true));
      ctx.lineTo(plot.valToPos(high, "x", true), plot.valToPos(high, "y", true));
    } else if (chart.zero && plot.scales.y.min < 0 && plot.scales.y.max > 0) {
      const level = plot.valToPos(0, "y", true);
      ctx.moveTo(bbox.left, level);
      ctx.lineTo(bbox.left + bbox.width, level);
    }
    ctx.stroke();
    ctx.restore();
  },

  // Charts of a part of the page that is drawn anew go with it.
  forget(root) {
    for (const chart of this.drawn) {
      if (root.contains(chart.holder)) {
        chart.plot?.destroy();
        this.drawn.delete(chart);
      }
    }
  },

  redraw() {
    for (const chart of this.drawn) this.build(chart);
  },

  resize() {
    for (const chart of this.drawn) {
      const width = Math.max(220, chart.holder.clientWidth);
      if (chart.plot.width !== width) chart.plot.setSize({ width, height: chart.height });
    }
  },
};

// Value and interval on a line through zero: rows of {label, value, low, high, tone}.
function forest(rows, label) {
  const known = rows.filter((row) => isNumber(row.value));
  if (!known.length) return null;
  const ends = known
    .flatMap((row) => [row.low ?? row.value, row.high ?? row.value])
    .concat(0)
    .filter(isNumber);
  const least = Math.min(...ends),
    most = Math.max(...ends);
  const spread = most - least || 1;
  const at = (value) => (8 + (284 * (value - least)) / spread).toFixed(1);
  const height = known.length * 22 + 8;
  const marks = known.map((row, index) => {
    const y = 16 + index * 22;
    const parts = [];
    if (isNumber(row.low) && isNumber(row.high)) {
      parts.push(svg("line", { x1: at(row.low), x2: at(row.high), y1: y, y2: y, class: "whisker" }));
    }
    parts.push(svg("circle", { cx: at(row.value), cy: y, r: 5 }));
    return svg("g", { class: `mark ${row.tone ?? ""}` }, parts);
  });
  return svg(
    "svg",
    { viewBox: `0 0 300 ${height}`, class: "forest", role: "img", "aria-label": label },
    svg("line", { x1: at(0), x2: at(0), y1: 2, y2: height - 2, class: "zero" }),
    marks,
  );
}
